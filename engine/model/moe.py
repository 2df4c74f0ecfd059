"""Mixture of experts (DeepSeek-V3, 2024, section 2.1.2): shared ones for every token, routed ones by choice."""

from collections.abc import Set
from dataclasses import replace

import torch

from engine.model.activations import InputForm, to_form
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward
from engine.model.formats.interface import ExpertShape
from engine.model.gate import Gate
from engine.model.normalized import Normalized
from engine.model.parameters import NamedParameters
from kernels.fp8_gemm import Workspace
from kernels.moe_permute import ExpertOutputs, combine
from kernels.norm import Delta

# Tokens whose copies for the experts exist at once: at DeepSeek's widths, nine a token, about 2.3 GB of workspace.
CHUNK_TOKENS = 8192
# Up to this many tokens the gate and the placement of rows wait for memory and for each other, not for multiprocessors:
# shared experts that are a layer of their own run beside them.
BESIDE_TOKENS = 256


class MixtureOfExperts:
    """Shared experts are the last ones of the routed experts' grouped products, or a layer of their own.

    A worker's ranks divide the routed experts; each computes the shared ones of its own rows.
    """

    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        hidden, width, shared = config.hidden_size, config.moe_intermediate_size, config.n_shared_experts
        group = self._group = allocate.expert_group
        joined = 0 if allocate.formats.shared_apart or group.divides else shared
        self.gate = Gate(config, allocate, joined)
        self._held = group.share.of(config.n_routed_experts)
        self._experts = allocate.experts(
            ExpertShape(
                routed=group.share.size(config.n_routed_experts),
                shared=joined,
                hidden=hidden,
                width=group.width_share.size(width),
                first=self._held.start,
                width_share=group.width_share,
            )
        )
        self._shared = None if joined else FeedForward(hidden, shared * width, allocate)
        self._side_stream = allocate.side_stream

    def parameters(self, prefix: str) -> NamedParameters:
        yield from self.gate.parameters(f"{prefix}.gate")
        yield from self._experts.parameters(prefix)
        if self._shared is not None:
            yield from self._shared.parameters(f"{prefix}.shared_experts")

    def finish(self) -> None:
        """Called once, when all parameters are filled."""
        self._experts.finish()

    @property
    def input_forms(self) -> Set[InputForm]:
        """In which it reads the tokens."""
        forms = {InputForm.PLAIN, self._experts.input_form}
        return forms if self._shared is None else forms | self._shared.input_forms

    def forward(self, hidden: Normalized, workspace: Workspace) -> Delta:
        """[tokens, hidden] to [tokens, hidden]; sums may be left to whoever adds them to the residual."""
        most = CHUNK_TOKENS // self._group.ranks
        if hidden.tokens <= most:
            return self._outputs(hidden, workspace)
        out = torch.empty_like(hidden.plain)
        for start in range(0, hidden.tokens, most):
            chunk = slice(start, min(start + most, hidden.tokens))
            outputs = self._outputs(hidden.rows(chunk), workspace)
            out[chunk] = combine(outputs) if isinstance(outputs, ExpertOutputs) else outputs
        return out

    def _outputs(self, hidden: Normalized, workspace: Workspace) -> Delta:
        if self._group.divides:
            return self._divided(hidden, workspace)
        if self._shared is None:
            return self.routed(hidden)
        if not hidden.plain.is_cuda or hidden.tokens > BESIDE_TOKENS:
            shared = self._shared.forward(hidden, workspace)
            return replace(self.routed(hidden), shared=shared)
        with self._side_stream.beside() as own_workspace:
            shared = self._shared.forward(hidden, own_workspace)
        routed = self.routed(hidden)
        self._side_stream.join()
        return replace(routed, shared=shared)

    def routed(self, hidden: Normalized) -> ExpertOutputs:
        """What the experts that each token chose make of it, and shared ones that are computed with them."""
        weights, choices = self.gate.choose(hidden.plain)
        rows, positions = self._experts.forward(hidden.in_form(self._experts.input_form), choices)
        return ExpertOutputs(rows, positions, weights)

    def _divided(self, hidden: Normalized, workspace: Workspace) -> torch.Tensor:
        """What the experts of all ranks make of this rank's rows: [tokens, hidden]."""
        assert self._shared is not None
        weights, choices = self.gate.choose(hidden.plain)
        everybody = (self._group.gather(each) for each in (hidden.plain, weights, choices))
        routed = self._group.sum(self._own_sums(*everybody))
        return (routed + self._shared.forward(hidden, workspace)).to(hidden.plain.dtype)

    def _own_sums(self, rows: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of all ranks' rows, by weight: [rows, hidden] float32.

        rows: [rows, hidden]; weights, choices: [rows, k], of experts of all ranks.
        """
        sums = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        tokens, places = ((choices >= self._held.start) & (choices < self._held.stop)).nonzero(as_tuple=True)
        if not len(tokens):
            return sums
        own = choices[tokens, places].unsqueeze(1) - self._held.start
        outputs, positions = self._experts.forward(to_form(rows[tokens], self._experts.input_form), own)
        values = outputs.flatten(0, -2)[positions.squeeze(1)].float()
        return sums.index_add_(0, tokens, values * weights[tokens, places].unsqueeze(1))

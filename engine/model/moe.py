"""Mixture of experts (DeepSeek-V3, 2024, section 2.1.2): shared ones for every token, routed ones by choice."""

from collections.abc import Set
from dataclasses import replace

import torch

from engine.model.activations import InputForm, Sent
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
# Up to this many tokens the gate, the placement of rows and other ranks are waited for, not multiprocessors:
# shared experts that are a layer of their own run beside them.
BESIDE_TOKENS = 256


class MixtureOfExperts:
    """Shared experts are the last ones of the routed experts' grouped products, or a layer of their own.

    A worker's ranks divide the routed experts; each computes the shared ones of its own rows.
    """

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        """index: of its layer."""
        hidden, width, shared = config.hidden_size, config.moe_intermediate_size, config.n_shared_experts
        group = self._group = allocate.expert_group
        joined = 0 if allocate.formats.shared_apart or group.divides else shared
        self.gate = Gate(config, allocate, joined)
        # None if experts lie in order and stay there.
        self.slots = allocate.expert_slots(index)
        slots = config.n_routed_experts if self.slots is None else len(self.slots.placement.experts)
        self.experts = allocate.experts(
            ExpertShape(
                routed=group.share.size(slots),
                shared=joined,
                hidden=hidden,
                width=group.width_share.size(width),
                first=group.share.of(slots).start,
                elsewhere=slots - group.share.size(slots),
                width_share=group.width_share,
                published=None if self.slots is None else self.slots.held,
            )
        )
        self._shared = None if joined else FeedForward(hidden, shared * width, allocate)
        self._side_stream = allocate.side_stream

    def parameters(self, prefix: str) -> NamedParameters:
        yield from self.gate.parameters(f"{prefix}.gate")
        yield from self.experts.parameters(prefix)
        if self._shared is not None:
            yield from self._shared.parameters(f"{prefix}.shared_experts")

    def finish(self) -> None:
        """Called once, when all parameters are filled."""
        self.experts.finish(self._group)

    @property
    def input_forms(self) -> Set[InputForm]:
        """In which it reads the tokens."""
        forms = {InputForm.PLAIN, self.experts.input_form}
        return forms if self._shared is None else forms | self._shared.input_forms

    def forward(self, hidden: Normalized, workspace: Workspace, counted: torch.Tensor | None = None) -> Delta:
        """[tokens, hidden] to [tokens, hidden]; sums may be left to whoever adds them to the residual.

        counted: [tokens] int64, 1 for tokens of requests, 0 for padding; experts that have `slots` need it.
        """
        most = CHUNK_TOKENS // self._group.ranks
        if hidden.tokens <= most:
            return self._outputs(hidden, workspace, counted)
        out = torch.empty_like(hidden.plain)
        for start in range(0, hidden.tokens, most):
            chunk = slice(start, min(start + most, hidden.tokens))
            outputs = self._outputs(hidden.rows(chunk), workspace, None if counted is None else counted[chunk])
            out[chunk] = combine(outputs) if isinstance(outputs, ExpertOutputs) else outputs
        return out

    def _outputs(self, hidden: Normalized, workspace: Workspace, counted: torch.Tensor | None) -> Delta:
        if self._shared is None:
            return self.routed(hidden)
        if not hidden.plain.is_cuda or hidden.tokens > BESIDE_TOKENS:
            shared = self._shared.forward(hidden, workspace)
            return self._added(self.routed(hidden, counted), shared)
        with self._side_stream.beside() as own_workspace:
            shared = self._shared.forward(hidden, own_workspace)
        routed = self.routed(hidden, counted)
        self._side_stream.join()
        return self._added(routed, shared)

    def routed(self, hidden: Normalized, counted: torch.Tensor | None = None) -> ExpertOutputs:
        """What the experts that each token chose make of it, and shared ones that are computed with them.

        If ranks divide the experts: what this rank's make of the tokens of all ranks. counted: as in `forward`.
        """
        weights, choices = self.gate.choose(hidden.plain)
        rows: Sent = hidden.in_form(self.experts.input_form)
        if self._group.divides:
            if self.slots is not None:
                assert counted is not None
                choices = self.slots.route(choices, counted)
            sent = self.experts.to_send(hidden.in_form(self.experts.input_form))
            rows, weights, choices = self._group.begin_dispatch(sent, weights, choices).finish()
        outputs, positions = self.experts.forward(rows, choices)
        return ExpertOutputs(outputs, positions, weights)

    def _added(self, routed: ExpertOutputs, shared: torch.Tensor) -> Delta:
        """With shared experts' outputs [tokens, hidden] for this rank's rows: of divided experts their sums.

        A rank's sums travel in the model's dtype: in bfloat16 they are half as many bytes, and each is rounded as the
        sum of all is.
        """
        if not self._group.divides:
            return replace(routed, shared=shared)
        return self._group.begin_sum(combine(routed, shared, self._group.rank * len(shared))).finish()

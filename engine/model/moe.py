"""Mixture of experts (DeepSeek-V3, 2024, section 2.1.2): shared ones for every token, routed ones by choice."""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import islice

import torch

from engine.exchange.interface import Begun
from engine.model.activations import InputForm, Normalized
from engine.model.allocator import Allocator
from engine.model.chunks import CHUNK_TOKENS, DIVIDED_CHUNKS
from engine.model.config import ModelConfig
from engine.model.expert_group import Dispatched
from engine.model.feed_forward import FeedForward
from engine.model.formats.interface import ExpertShape
from engine.model.formats.plain import PlainExperts
from engine.model.gate import Gate
from engine.model.parameters import NamedParameters
from kernels.act_quant.quantized import aligned_rows
from kernels.fp8_gemm import Workspace
from kernels.fp8_gemm.operands import BLOCK
from kernels.moe_gate import Listed
from kernels.moe_permute import ExpertOutputs, combine
from kernels.norm import Delta

# Up to this many tokens a step waits for the gate, the placement of rows and other ranks, not for multiprocessors. So
# shared experts that are a layer of their own run on a side stream meanwhile.
ASIDE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Tokens on their way to their experts."""

    # Rows, weights and choices: of all ranks if these divide the experts.
    sent: Begun[Dispatched]
    # The output of shared experts that are a layer of their own, or this rank's part of it if all ranks have the
    # tokens. None if they are among the routed ones, or if another rank computes them.
    shared: torch.Tensor | None
    # Whether `shared` is computed on the side stream.
    aside: bool
    # Whether the rows went to the experts of all ranks, whose outputs are then added up across the ranks.
    exchanges: bool


def chunk_tokens(ranks: int) -> int:
    """The most tokens of each rank whose copies for the experts exist at once: aligned, as all chunks are."""
    return CHUNK_TOKENS if ranks == 1 else aligned_rows(DIVIDED_CHUNKS * CHUNK_TOKENS // ranks)


def _chunks(tokens: int, most: int) -> list[slice]:
    """As few chunks as possible, of equal lengths: one of few tokens takes as long as reading all experts' weights."""
    length = aligned_rows(-(-tokens // -(-tokens // most)))
    return [slice(start, min(start + length, tokens)) for start in range(0, tokens, length)]


class MixtureOfExperts:
    """Shared experts are the last ones of the routed experts' grouped products, or a layer of their own.

    A worker's ranks divide the routed experts. Each computes the shared ones for its own rows. Of few rows that all
    ranks have, each computes a share of the shared experts' width; if that cannot be divided, the first rank computes
    it all.
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
            ),
            index,
        )
        self._shared = None if joined else FeedForward(hidden, shared * width, allocate)
        # A copy of this rank's share, for few rows that all ranks have: the others would wait for one rank that reads
        # all of it.
        self._shared_part = None
        ranks = allocate.group.share.count
        if not joined and allocate.group.has_everywhere(1) and shared * width % (ranks * BLOCK) == 0:
            self._shared_part = FeedForward(hidden, shared * width, allocate, allocate.group.share)
        self._side_stream = allocate.side_stream
        # One rank on a CPU pads no step, and saves looking.
        self._skips_padding = group.share.count > 1 or allocate.device.type != "cpu"
        of_shared = frozenset() if self._shared is None else self._shared.input_forms
        # The forms in which it reads the tokens.
        self.input_forms: Set[InputForm] = frozenset({InputForm.PLAIN, self.experts.input_form}) | of_shared

    def parameters(self, prefix: str) -> NamedParameters:
        yield from self.gate.parameters(f"{prefix}.gate")
        yield from self.experts.parameters(prefix)
        if self._shared is not None:
            yield from self._shared.parameters(f"{prefix}.shared_experts")
        if self._shared_part is not None:
            yield from self._shared_part.parameters(f"{prefix}.shared_experts")

    def finish(self) -> None:
        """Called once, when all parameters are filled."""
        self.experts.finish(self._group)
        for shared in (self._shared, self._shared_part):
            if shared is not None:
                shared.finish()

    def forward(
        self,
        hidden: Normalized,
        workspace: Workspace,
        counted: torch.Tensor | None = None,
        *,
        everywhere: bool = False,
    ) -> Delta:
        """[tokens, hidden] to [tokens, hidden]; sums may be left to whoever adds them to the residual.

        counted: [tokens] bool, whether a token is of a request; None if all are. Padding goes to no expert: among few
        tokens each expert that is chosen costs the time to read it. everywhere: all ranks have these tokens, which are
        few; the result is this rank's part of a sum over the ranks.
        """
        most = chunk_tokens(self._group.ranks)
        if hidden.tokens <= most:
            exchanges = self._group.divides and not everywhere
            return self._outputs(self._choose(hidden, workspace, counted, exchanges=exchanges))
        return self._in_chunks(_chunks(hidden.tokens, most), hidden, workspace, counted)

    def choose_at_once(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        counted: torch.Tensor | None,
    ) -> Listed | None:
        """What `forward_listed` computes: rows to which a delta is added first, with their experts. None, with the
        residual as it was, where no kernel makes it at once.

        delta, residual: [tokens, hidden], of which no other rank has any; norm: [hidden]; counted: see `forward`.
        """
        apart = self._group.divides or self.slots is not None or self._shared is not None
        if apart or not isinstance(self.experts, PlainExperts):
            return None
        counted = counted if self._skips_padding else None
        return self.gate.add_norm_and_choose(delta, residual, norm, epsilon, counted)

    def forward_listed(self, listed: Listed) -> ExpertOutputs:
        """As `forward`, of what `choose_at_once` made."""
        assert isinstance(self.experts, PlainExperts)
        rows = self.experts.forward_listed(listed.plain, listed.rows)
        return ExpertOutputs(rows, listed.rows.positions, listed.weights)

    def routed(
        self, hidden: Normalized, counted: torch.Tensor | None = None, *, everywhere: bool = False
    ) -> ExpertOutputs:
        """The outputs of each token's chosen experts, and of shared experts that are computed with them.

        If ranks divide the experts, these are the outputs of this rank's experts for the tokens of all ranks. Arguments
        as in `forward`.
        """
        exchanges = self._group.divides and not everywhere
        return self._computed(self._send(hidden, counted, exchanges=exchanges))

    def _in_chunks(
        self,
        chunks: Sequence[slice],
        hidden: Normalized,
        workspace: Workspace,
        counted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Routed experts compute one chunk after the other, shared ones of their own all tokens at once."""
        sends = (self._send_chunk(chunk, hidden, counted) for chunk in chunks)
        # If rows travel while this rank computes, the next chunk's do so while the experts compute this one's. On one
        # host a gather would run before the experts, and its buffers would be kept for nothing.
        sent_ahead = deque(islice(sends, 1 if self._group.overlaps else 0))
        # Holds the shared experts' outputs, until each chunk's sums take their place.
        out = (
            torch.empty_like(hidden.unquantized()) if self._shared is None else self._shared.forward(hidden, workspace)
        )
        for chunk in chunks:
            sent_ahead.extend(islice(sends, 1))
            sent, shared = sent_ahead.popleft(), None if self._shared is None else out[chunk]
            chosen = _Chosen(sent, shared, aside=False, exchanges=self._group.divides)
            outputs = self._outputs(chosen)
            if isinstance(outputs, ExpertOutputs):
                combine(outputs, out=out[chunk])
            else:
                out[chunk] = outputs
            # Frees most of a step's memory.
            del sent, chosen, outputs
        return out

    def _send_chunk(self, chunk: slice, hidden: Normalized, counted: torch.Tensor | None) -> Begun[Dispatched]:
        counted = None if counted is None else counted[chunk]
        return self._send(hidden.rows(chunk), counted, exchanges=self._group.divides)

    def _choose(
        self, hidden: Normalized, workspace: Workspace, counted: torch.Tensor | None, *, exchanges: bool
    ) -> _Chosen:
        apart = self._shared_of(exchanges)
        if apart is None:
            return _Chosen(self._send(hidden, counted, exchanges=exchanges), None, False, exchanges)
        if hidden.unquantized().is_cuda and hidden.tokens <= ASIDE_TOKENS and not self._group.turns.taken:
            with self._side_stream.branch() as own_workspace:
                shared = apart.forward(hidden, own_workspace)
            return _Chosen(self._send(hidden, counted, exchanges=exchanges), shared, True, exchanges)
        sent = self._send(hidden, counted, exchanges=exchanges)
        return _Chosen(sent, apart.forward(hidden, workspace), False, exchanges)

    def _shared_of(self, exchanges: bool) -> FeedForward | None:
        """What computes shared experts here, or this rank's part of them; None if nothing does."""
        if exchanges or not self._group.divides:
            return self._shared
        return self._shared_part or (self._shared if self._group.rank == 0 else None)

    def _send(self, hidden: Normalized, counted: torch.Tensor | None, *, exchanges: bool) -> Begun[Dispatched]:
        weights, choices = self.gate.choose(hidden, counted if self._skips_padding else None)
        rows = hidden.in_form(self.experts.input_form)
        if self.slots is not None:
            choices = self.slots.route(choices, counts=exchanges or self._group.rank == 0)
        if not exchanges:
            return Begun(lambda: Dispatched(rows, weights, choices))
        return self._group.begin_dispatch(self.experts.to_send(rows), weights, choices)

    def _computed(self, sent: Begun[Dispatched], shared: torch.Tensor | None = None) -> ExpertOutputs:
        rows, weights, choices, _ = sent.finish()
        outputs, positions = self.experts.forward(rows, choices)
        return ExpertOutputs(outputs, positions, weights, shared)

    def _outputs(self, chosen: _Chosen) -> Delta:
        if not chosen.exchanges:
            return self._joined(chosen, chosen.shared)
        assert chosen.shared is not None, "ranks that divide the experts compute shared ones apart"
        return self._group.sum(self._joined(chosen), chosen.sent.finish(), chosen.shared)

    def _joined(self, chosen: _Chosen, shared: torch.Tensor | None = None) -> ExpertOutputs:
        """shared: outputs of shared experts, to be added to the sums."""
        routed = self._computed(chosen.sent, shared)
        if chosen.aside:
            self._side_stream.join()
        return routed

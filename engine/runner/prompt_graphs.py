"""Steps with few tokens of prompts as captured graphs of all but their prompts' attention.

Launched kernel by kernel, a step of up to some 1,500 tokens takes the host longer than the device. Attention of prompts
differs with their lengths and forms, and stays with the host: five launches a layer of some twenty-five. That of the
rows that decode, the first ones of a step, is captured.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.model.context import AbsorbedRows, DeviceState, ForwardContext
from engine.model.model import Model, OnLayers
from engine.runner.capture import Capture, Pieces
from kernels.mla_decode import plan_decode
from mesh.blocks import BLOCK_TOKENS, blocks_for

# The most tokens of rows that decode whose attention is captured. Those of a graph that a step does not fill cost the
# device little: they attend to one token.
MOST_DECODING = 96


class PromptGraphs:
    """Captured steps by number of tokens. They run one at a time, over the same inputs and outputs."""

    def __init__(
        self, model: Model, state: DeviceState, sizes: Sequence[int], capture: Capture, decoding: int = MOST_DECODING
    ) -> None:
        """decoding: tokens of rows that decode whose attention is captured, as far as a size has room for them."""
        most, device = max(sizes), state.device
        # What indexers select for rows that decode is not captured.
        self._decoding = _DecodingRows(state, 0 if state.index_pool is not None else decoding)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._rotations = state.rotations[:1].repeat(most, 1)
        self._slots = torch.full_like(self._token_ids, state.padding_block * BLOCK_TOKENS)
        self._real = torch.zeros(most, dtype=torch.bool, device=device)
        self._hidden = torch.empty(most, model.config.hidden_size, dtype=model.dtype, device=device)
        # The largest sets the size of the graphs' memory.
        self._captured = {size: self._capture(model, state, size, capture) for size in sorted(sizes, reverse=True)}

    @property
    def count(self) -> int:
        return len(self._captured)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest."""
        return max(self._captured)

    def fit(self, contexts: Sequence[ForwardContext]) -> bool:
        """contexts: of a step's parts."""
        return len(contexts) == 1 and len(contexts[0].token_ids) in self._captured

    def hidden_states(self, context: ForwardContext, on_layers: OnLayers | None) -> torch.Tensor:
        """As `Model.hidden_states`, of a context that fits; to be read before the next run."""
        tokens = len(context.token_ids)
        self._token_ids[:tokens] = context.token_ids
        self._rotations[:tokens] = context.rotations
        self._slots[:tokens] = context.slots
        self._real[:tokens] = context.real
        self._captured[tokens].run(replace(context, absorbed=self._decoding.take(context), padding=0), on_layers)
        return self._hidden[:tokens]

    def _capture(self, model: Model, state: DeviceState, tokens: int, capture: Capture) -> Pieces:
        padding = ForwardContext(
            token_ids=self._token_ids[:tokens],
            rotations=self._rotations[:tokens],
            slots=self._slots[:tokens],
            real=self._real[:tokens],
            absorbed=[],
            expanded=[],
            sampled=None,
            kv_pool=state.kv_pool,
            kv_scale=state.kv_scale,
            workspace=state.workspace,
            padding=tokens,
            index_pool=state.index_pool,
        )
        model.short().hidden_states(replace(padding, absorbed=self._decoding.captured(tokens)))

        def forward(pieces: Pieces) -> None:
            context = replace(padding, absorbed=self._decoding.captured(tokens), cut=pieces.cut)
            self._hidden[:tokens] = model.hidden_states(context, on_layers=pieces.layer_enqueued)

        pieces = capture.in_pieces(forward)
        # The first run takes graphs to the device, while the host captures the next ones.
        pieces.run(padding, None)
        return pieces


class _DecodingRows:
    """The tokens of rows that decode, with which captured steps begin, as rows of one token each. What a step lacks of
    them attends to one token of padding, and its values are replaced by those of the step's other tokens.
    """

    def __init__(self, state: DeviceState, tokens: int) -> None:
        self._padding_block = state.padding_block
        blocks = blocks_for(len(state.rotations))
        self._table = torch.full((tokens, blocks), state.padding_block, dtype=torch.int32, device=state.device)
        self._lengths = torch.ones(tokens, dtype=torch.int32, device=state.device)

    def captured(self, tokens: int) -> list[AbsorbedRows]:
        """The rows as a step of this many tokens has them. Called in the capture: see `plan_decode`."""
        rows = min(tokens, len(self._lengths))
        return [AbsorbedRows(0, rows, plan_decode(self._table[:rows], self._lengths[:rows]))] if rows else []

    def take(self, context: ForwardContext) -> list[AbsorbedRows]:
        """Makes the step's rows that decode those of the captured steps, as far as they fit. Returns the rows that are
        left.

        Each token of a row attends to those before it: their latents are written before a layer attends. Those of a
        chunk that ranks compute together come later, between the captured pieces.
        """
        taken, left, most = 0, list(context.absorbed), min(len(self._lengths), context.decoding)
        while left and left[0].first == taken and left[0].stop <= most:
            rows = left.pop(0)
            plan, own = rows.plan, slice(taken, rows.stop)
            self._table[own, : plan.block_table.shape[1]] = plan.block_table.repeat_interleave(plan.query_tokens, dim=0)
            after = torch.arange(1 - plan.query_tokens, 1, dtype=torch.int32, device=plan.lengths.device)
            self._lengths[own] = (plan.lengths[:, None] + after).flatten()
            taken = rows.stop
        self._lengths[taken:] = 1
        self._table[taken:, 0] = self._padding_block
        return left

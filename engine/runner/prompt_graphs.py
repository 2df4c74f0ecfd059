"""Steps with few tokens of prompts as captured graphs of all but their attention.

Launched kernel by kernel, a step of up to some 1,500 tokens takes the host longer than the device. Attention differs
with the rows' lengths and forms, and stays with the host: five or six launches a layer of some twenty-five.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.model.context import DeviceState, ForwardContext
from engine.model.model import Model, OnLayers
from engine.runner.capture import Capture, Pieces
from mesh.blocks import BLOCK_TOKENS


class PromptGraphs:
    """Captured steps by number of tokens. They run one at a time, over the same inputs and outputs."""

    def __init__(self, model: Model, state: DeviceState, sizes: Sequence[int], capture: Capture) -> None:
        most, device = max(sizes), state.device
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
        self._captured[tokens].run(context, on_layers)
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
        model.short().hidden_states(padding)

        def forward(pieces: Pieces) -> None:
            context = replace(padding, cut=pieces.cut)
            self._hidden[:tokens] = model.hidden_states(context, on_layers=pieces.layer_enqueued)

        pieces = capture.in_pieces(forward)
        # The first run takes graphs to the device, while the host captures the next ones.
        pieces.run(padding, None)
        return pieces

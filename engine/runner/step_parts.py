"""A step's parts through the model: the whole step, or two micro-batches that take turns.

While the rows or sums of one part travel between ranks, the rank computes another part.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.model.context import DeviceState, ForwardContext
from engine.model.decode_inputs import DecodeRows
from engine.model.inputs import decode_context
from engine.model.model import Model, OnLayers


def logits(model: Model, parts: Sequence[ForwardContext], on_layers: OnLayers | None = None) -> torch.Tensor:
    """`Model.forward` of all parts: [rows, vocabulary] of the tokens that each wants. Tokens may attend to those of
    earlier parts.
    """
    wanted = _computed(
        model, parts, on_layers, lambda part, on_layers: model.hidden_states(part, on_layers, part.sampled)
    )
    return model.logits(_joined(wanted))


def hidden_states(model: Model, parts: Sequence[ForwardContext], on_layers: OnLayers | None = None) -> torch.Tensor:
    """`Model.hidden_states` of all parts: [tokens, hidden], with the padding of the last part alone."""
    hidden = _computed(model, parts, on_layers, model.hidden_states)
    before = [states[: len(states) - part.padding] for part, states in zip(parts[:-1], hidden[:-1], strict=True)]
    return _joined([*before, hidden[-1]])


def decode_parts(rows: DecodeRows, state: DeviceState, *, halves: bool) -> list[ForwardContext]:
    """`decode_context` of all rows, or of each half of two or more rows."""
    parts = _halves(rows) if halves and rows.rows > 1 else (rows,)
    return [decode_context(part, state, rows.rows * rows.row_tokens) for part in parts]


def _computed(
    model: Model,
    parts: Sequence[ForwardContext],
    on_layers: OnLayers | None,
    compute: Callable[[ForwardContext, OnLayers | None], torch.Tensor],
) -> list[torch.Tensor]:
    if len(parts) == 1:
        return [compute(parts[0], on_layers)]
    turns, done, last = model.expert_group.turns, [0] * len(parts), len(parts) - 1

    def call(index: int) -> torch.Tensor:
        def passed(count: int) -> None:
            done[index] = count
            # The part before may wait more often, once for each chunk of its experts. It has to write its keys of the
            # next layer first, since tokens of this part may attend to them.
            while index and done[index - 1] < count:
                turns.wait()
            if index == last and on_layers is not None:
                on_layers(count)

        return compute(parts[index], passed)

    return turns.take([partial(call, index) for index in range(len(parts))])


def _halves(rows: DecodeRows) -> tuple[DecodeRows, DecodeRows]:
    middle = -(-rows.rows // 2)
    first, second = (
        DecodeRows(
            rows.token_ids[part],
            rows.starts[part],
            rows.block_table[part],
            rows.real[part],
            None if rows.shared is None else rows.shared[part],
        )
        for part in (slice(0, middle), slice(middle, rows.rows))
    )
    return first, second


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))

"""How often requests have each token, on the device: what penalties lower logits by.

Counts are updated by the drawn tokens in the stream's order, before the host has read them, so that a step launched
ahead finds them right. A request whose counts are not there, or end at another position (it comes from another worker,
or made room for others), is counted anew from its tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import History, Row
from kernels.host_copy import to_device
from kernels.sample import Penalty, count_drawn, count_tokens, penalize


@dataclass(slots=True)
class _Slot:
    """A row of the counts. position: how many of its request's tokens are counted."""

    index: int
    position: int | None = None


class TokenCounts:
    """Counts of up to `slots` requests, of which the least recently used makes room for a new one."""

    def __init__(self, slots: int, vocabulary_size: int, device: torch.device) -> None:
        # [slots, vocabulary] int32; see kernels.sample.penalties.
        self._counts = torch.zeros(slots, vocabulary_size, dtype=torch.int32, device=device)
        self._free = list(range(slots))
        # By the request's key.
        self._slots: OrderedDict[int, _Slot] = OrderedDict()

    def penalize(self, logits: torch.Tensor, rows: Sequence[Row], drawn: torch.Tensor) -> None:
        """Lower the logits of rows with a history, in place. logits: [rows, vocabulary] float32.

        drawn: [most rows] int64, the tokens that rows may follow.
        """
        slots = [self._slot(_history(row)) for row in rows]
        for row, slot in zip(rows, slots, strict=True):
            if slot.position != row.end:
                self._count(slot, row, drawn)
        penalize(logits, self._counts, [_penalty(row, slot) for row, slot in zip(rows, slots, strict=True)])

    def count(self, rows: Sequence[Row], token_ids: torch.Tensor) -> None:
        """Count what these rows drew, which `penalize` was called with. token_ids: [rows] int64 on the device."""
        slots = [self._slots[_history(row).key] for row in rows]
        indices = to_device(np.array([slot.index for slot in slots], np.int64), token_ids.device)
        count_drawn(self._counts, indices, token_ids)
        for row, slot in zip(rows, slots, strict=True):
            slot.position = row.end + 1

    def _slot(self, history: History) -> _Slot:
        slot = self._slots.pop(history.key, None)
        if slot is None:
            slot = _Slot(self._free.pop() if self._free else self._slots.popitem(last=False)[1].index)
        self._slots[history.key] = slot
        return slot

    def _count(self, slot: _Slot, row: Row, drawn: torch.Tensor) -> None:
        history, counts = _history(row), self._counts[slot.index]
        known = history.token_ids[: row.end]
        count_tokens(counts, known[: history.prompt_tokens], known[history.prompt_tokens :])
        if len(known) < row.end:
            assert row.follows is not None and len(known) == row.end - 1
            counts[drawn[row.follows : row.follows + 1]] += 1
        slot.position = row.end


def _history(row: Row) -> History:
    assert row.history is not None
    return row.history


def _penalty(row: Row, slot: _Slot) -> Penalty:
    sampling = row.sampling
    assert sampling is not None
    return Penalty(
        slot=slot.index,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
    )

"""How often requests have each token, on the device: penalties lower logits by these counts.

Counts are updated by the drawn tokens in the stream's order, before the host has read them, so that a step launched
ahead finds them right. A request whose counts are not there, or end at another position (it comes from another worker,
or made room for others), is counted again from its tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import History, Row
from kernels.host_copy import to_indices
from kernels.sample import Penalty, count_drawn, count_tokens, penalize


@dataclass(slots=True)
class _Slot:
    """A row of the counts. position: how many of its request's tokens are counted."""

    index: int
    position: int | None = None


class TokenCounts:
    """Counts of up to `slots` requests; a new one replaces the least recently used."""

    def __init__(self, slots: int, vocabulary_size: int, device: torch.device) -> None:
        # [slots, vocabulary] int32; see kernels.sample.penalties.
        self._counts = torch.zeros(slots, vocabulary_size, dtype=torch.int32, device=device)
        self._free = list(range(slots))
        # By the request's key.
        self._slots: OrderedDict[int, _Slot] = OrderedDict()

    def penalize(self, logits: torch.Tensor, rows: Sequence[Row], drafts: torch.Tensor | None = None) -> None:
        """Lower the logits of rows with a history, in place. logits: [rows, vocabulary] float32.

        drafts: [rows, n] int64, those before the token that the row draws, NO_TOKEN where there are fewer. If they are
        given, rows may be listed several times. For a row that follows another, what that drew has been counted.
        """
        slots = self._slots_of(rows)
        for row, slot in zip(rows, slots, strict=True):
            counted = drafts is not None and row.follows is not None
            if not counted and slot.position != row.end - row.drafts:
                self._count(slot, row)
        counts, places = self._counts, [slot.index for slot in slots]
        if drafts is not None:
            indices = to_indices(places, drafts.device)
            counts, places = counts[indices], list(range(len(rows)))
            count_drawn(counts, torch.arange(len(rows), device=drafts.device), drafts)
        penalize(logits, counts, [_penalty(row, place) for row, place in zip(rows, places, strict=True)])

    def count(self, rows: Sequence[Row], token_ids: torch.Tensor) -> None:
        """Count what these rows drew, which `penalize` was called with. token_ids: [rows] int64 on the device."""
        self.count_yields(rows, token_ids.unsqueeze(1))
        for row in rows:
            self._slots[_history(row).key].position = row.end + 1

    def count_yields(self, rows: Sequence[Row], token_ids: torch.Tensor) -> None:
        """Count what these rows yield, as the device knows: [rows, n] int64, NO_TOKEN where a row yields fewer."""
        slots = [self._slots[_history(row).key] for row in rows]
        count_drawn(self._counts, to_indices([slot.index for slot in slots], token_ids.device), token_ids)

    def settle(self, row: Row, tokens: int) -> None:
        """Note how many tokens `count_yields` counted, once the host knows."""
        slot = self._slots.get(_history(row).key)
        if slot is not None and slot.position is not None:
            slot.position += tokens

    def _slots_of(self, rows: Sequence[Row]) -> list[_Slot]:
        """The rows' slots. A new request takes no slot of another one in the step."""
        for row in rows:
            if _history(row).key in self._slots:
                self._slots.move_to_end(_history(row).key)
        return [self._slot(_history(row)) for row in rows]

    def _slot(self, history: History) -> _Slot:
        slot = self._slots.pop(history.key, None)
        if slot is None:
            slot = _Slot(self._free.pop() if self._free else self._slots.popitem(last=False)[1].index)
        self._slots[history.key] = slot
        return slot

    def _count(self, slot: _Slot, row: Row) -> None:
        history, counts = _history(row), self._counts[slot.index]
        end = row.end - row.drafts
        known = history.token_ids[:end]
        # A row that follows another had its counts in the step before, and no step takes those of its own rows.
        assert len(known) == end, "the step before has counted what it drew"
        count_tokens(counts, known[: history.prompt_tokens], known[history.prompt_tokens :])
        slot.position = end


def _history(row: Row) -> History:
    assert row.history is not None
    return row.history


def _penalty(row: Row, slot: int) -> Penalty:
    sampling = row.sampling
    assert sampling is not None
    return Penalty(
        slot=slot,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
    )

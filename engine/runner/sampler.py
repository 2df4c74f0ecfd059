"""From a step's logits to its samples: drawn on the device, read later by the host."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Row, Sample
from engine.model.tensor_group import TensorGroup
from engine.runner.token_counts import TokenCounts
from kernels.host_copy import HostCopies, to_indices
from kernels.sample import Draw, Penalty, add_bias, draw, forbid, greedy, logprobs, penalize
from mesh.domain.outputs import Logprobs
from mesh.domain.sampling import Sampling

# A function that may replace drawn tokens. It gets the logits that rows were drawn from, their tokens, and the rows'
# indices in what was given to `draw`, and returns tokens.
Replace: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]


def keep(logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A Replace that replaces nothing."""
    return token_ids


class Sampler:
    """Draws tokens, and keeps the counts that penalties need. Called in the order of the steps, on every rank of a TP
    group.
    """

    def __init__(self, requests: int, vocabulary_size: int, device: torch.device, group: TensorGroup) -> None:
        """requests: the most rows of a step; group: its first rank draws for all."""
        self._counts = TokenCounts(requests, vocabulary_size, device)
        self._group = group

    def draw(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        replace: Replace = keep,
        positions: torch.Tensor | None = None,
        drafts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One token per row, all of which have `sampling`: [rows] int64 on the device. A row that draws several is
        listed as often, one after the other.

        logits: [rows, vocabulary], which stay as they are; positions: [rows], of the tokens that are drawn, by default
        the rows' ends; drafts: [rows, n] int64, those before each drawn token, NO_TOKEN where there are fewer. If they
        are given, call `count_yields` afterwards.
        """
        if self._group.leads:
            token_ids = self._draw(logits, rows, replace, positions, drafts)
        else:
            token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        return self._group.from_first(token_ids)

    def count_yields(self, rows: Sequence[Row], token_ids: torch.Tensor) -> None:
        """Count what rows that count tokens yield: [rows, n] int64, NO_TOKEN where a row yields fewer."""
        if self._group.leads:
            self._counts.count_yields(rows, token_ids)

    def settle(self, row: Row, tokens: int) -> None:
        """Note how many tokens a row that counts them has yielded, once the host knows."""
        if self._group.leads:
            self._counts.settle(row, tokens)

    def _draw(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        replace: Replace,
        positions: torch.Tensor | None,
        drafts: torch.Tensor | None,
    ) -> torch.Tensor:
        masks = _masks(rows)
        changed = [index for index, row in enumerate(rows) if _sampling(row).changes_logits or index in masks]
        if not changed:
            return replace(logits, draw_tokens(logits, rows, positions), range(len(rows)))
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        plain = sorted({*range(len(rows))}.difference(changed))
        if plain:
            chosen = to_indices(plain, logits.device)
            found = draw_tokens(logits[chosen], [rows[index] for index in plain], _some(positions, chosen))
            token_ids[chosen] = replace(logits[chosen], found, plain)
        # Rows that count tokens come first.
        changed.sort(key=lambda index: not _sampling(rows[index]).counts_tokens)
        chosen = to_indices(changed, logits.device)
        token_ids[chosen] = self._draw_changed(
            logits[chosen].float(),
            [rows[index] for index in changed],
            [masks.get(index) for index in changed],
            _some(positions, chosen),
            _some(drafts, chosen),
            lambda logits, found, rows: replace(logits, found, [changed[row] for row in rows]),
        )
        return token_ids

    def _draw_changed(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        allowed: Sequence[npt.NDArray[np.uint8] | None],
        positions: torch.Tensor | None,
        drafts: torch.Tensor | None,
        replace: Replace,
    ) -> torch.Tensor:
        """As `_draw`, for rows that change their logits [rows, vocabulary] float32, which are overwritten.

        allowed: each row's mask, if it has one.
        """
        counting = [row for row in rows if _sampling(row).counts_tokens]
        if counting:
            before = None if drafts is None else drafts[: len(counting)]
            self._counts.penalize(logits[: len(counting)], counting, before)
        biases = [
            (index, token_id, bias)
            for index, row in enumerate(rows)
            for token_id, bias in _sampling(row).logit_bias.items()
        ]
        if biases:
            add_bias(logits, biases)
        masks = {index: bits for index, bits in enumerate(allowed) if bits is not None}
        if masks:
            forbid(logits, list(masks), np.stack(list(masks.values())))
        token_ids = replace(logits, draw_tokens(logits, rows, positions), range(len(rows)))
        if counting and drafts is None:
            self._counts.count(counting, token_ids[: len(counting)])
        return token_ids


def draw_likeliest(rows: Sequence[Row]) -> bool:
    """Whether each row, all of which have `sampling`, draws the most likely token of its logits as they are."""
    return all(
        row.masks is None and not _sampling(row).changes_logits and not _sampling(row).temperature for row in rows
    )


def draw_tokens(logits: torch.Tensor, rows: Sequence[Row], positions: torch.Tensor | None = None) -> torch.Tensor:
    """One token per row from logits [rows, vocabulary] that need no change: [rows] int64 on the device.

    positions: as in `Sampler.draw`.
    """
    assert logits.shape[0] == len(rows)
    draws = {index: _draw(row) for index, row in enumerate(rows) if _sampling(row).temperature > 0}
    if len(draws) == len(rows):
        return draw(logits, list(draws.values()), positions)
    token_ids = greedy(logits)
    if draws:
        chosen = to_indices(list(draws), logits.device)
        token_ids[chosen] = draw(logits[chosen], list(draws.values()), _some(positions, chosen))
    return token_ids


@torch.inference_mode()
def draw_nothing(vocabulary_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Draw in all ways from logits of this dtype, and of float32, as those that a request changes are, so that the
    kernels of draws are compiled.
    """
    changed = torch.zeros(2, vocabulary_size, dtype=torch.float32, device=device)
    penalize(changed, torch.zeros_like(changed, dtype=torch.int32), [Penalty(0, 1.0, 0.0, 0.0)] * 2)
    for logits in (changed.to(dtype), changed):
        for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9, top_k=50)):
            draw_tokens(logits, [Row([0], 0, [0], sampling)] * 2)


class PendingSamples:
    """Tokens, and the log probabilities that were asked for, while they are copied to the host."""

    def __init__(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[Row], on_host: torch.Tensor | None = None
    ) -> None:
        """logits: [rows, vocabulary] and token_ids: [rows] of the rows, all of which have `sampling`; on_host: where
        the host finds the tokens when the step has ended, if they need not be copied.
        """
        self._asked = {index: count for index, row in enumerate(rows) if (count := _alternatives(row)) is not None}
        found: tuple[torch.Tensor, ...] = ()
        if self._asked:
            asked = to_indices(list(self._asked), logits.device)
            most = min(max(self._asked.values()), logits.shape[1])
            found = logprobs(logits[asked], token_ids[asked], most)
        self._on_host = on_host
        copied = found if on_host is not None else (token_ids, *found)
        self._copies = HostCopies(copied) if copied else None

    def read(self) -> list[Sample]:
        """Wait for them, when the step has ended. Returns one sample per row."""
        found = [] if self._copies is None else self._copies.read()
        token_ids = found.pop(0) if self._on_host is None else self._on_host
        ordered = zip(*(values.tolist() for values in found), strict=True)
        by_row = {
            index: Logprobs(logprob=chosen, top_token_ids=ids[:count], top_logprobs=values[:count])
            for (index, count), (chosen, ids, values) in zip(self._asked.items(), ordered, strict=True)
        }
        return [
            Sample([token_id], [by_row[index]] if index in by_row else None)
            for index, token_id in enumerate(token_ids.tolist())
        ]


def _sampling(row: Row) -> Sampling:
    assert row.sampling is not None
    return row.sampling


def _masks(rows: Sequence[Row]) -> Mapping[int, npt.NDArray[np.uint8]]:
    """The masks of draws that have one, by draw. rows: the row of each draw; those of one row are consecutive."""
    found: dict[int, npt.NDArray[np.uint8]] = {}
    first = 0
    while first < len(rows):
        row = rows[first]
        if row.masks is not None:
            allowed = zip(range(first, first + row.draws), row.masks.wait(), strict=False)
            found |= {draw: bits for draw, bits in allowed if bits is not None}
        first += row.draws
    return found


def _draw(row: Row) -> Draw:
    sampling = _sampling(row)
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        position=row.end,
        min_p=sampling.min_p,
    )


def _some(values: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[chosen]


def _alternatives(row: Row) -> int | None:
    return _sampling(row).top_logprobs

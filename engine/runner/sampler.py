"""From a step's logits to its samples: drawn on the device, read later by the host."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Row, Sample
from kernels.host_copy import HostCopies, to_device
from kernels.sample import Draw, draw, greedy, logprobs
from mesh.domain.outputs import Logprobs
from mesh.domain.sampling import Sampling


def draw_tokens(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """One token per row, all of which have `sampling`: [rows] int64 on the device. logits: [rows, vocabulary]."""
    assert logits.shape[0] == len(rows)
    draws = {index: _draw(row) for index, row in enumerate(rows) if _sampling(row).temperature > 0}
    if len(draws) == len(rows):
        return draw(logits, list(draws.values()))
    token_ids = greedy(logits)
    if draws:
        chosen = _indices(list(draws), logits.device)
        token_ids[chosen] = draw(logits[chosen], list(draws.values()))
    return token_ids


class PendingSamples:
    """Tokens, and the log probabilities that were asked for, on their way to the host."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[Row]) -> None:
        """logits: [rows, vocabulary] and token_ids: [rows] of the rows, all of which have `sampling`."""
        self._asked = {index: count for index, row in enumerate(rows) if (count := _alternatives(row)) is not None}
        found: tuple[torch.Tensor, ...] = ()
        if self._asked:
            asked = _indices(list(self._asked), logits.device)
            most = min(max(self._asked.values()), logits.shape[1])
            found = logprobs(logits[asked], token_ids[asked], most)
        self._copies = HostCopies((token_ids, *found))

    def read(self) -> list[Sample]:
        """Wait for them. Returns one sample per row."""
        token_ids, *found = self._copies.read()
        ordered = zip(*(values.tolist() for values in found), strict=True)
        by_row = {
            index: Logprobs(logprob=chosen, top_token_ids=ids[:count], top_logprobs=values[:count])
            for (index, count), (chosen, ids, values) in zip(self._asked.items(), ordered, strict=True)
        }
        return [Sample(token_id, by_row.get(index)) for index, token_id in enumerate(token_ids.tolist())]


def _sampling(row: Row) -> Sampling:
    assert row.sampling is not None
    return row.sampling


def _draw(row: Row) -> Draw:
    sampling = _sampling(row)
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        position=row.end,
    )


def _alternatives(row: Row) -> int | None:
    return _sampling(row).top_logprobs


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, np.int64), device)

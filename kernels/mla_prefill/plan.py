"""The lengths of one step's prompts: made once a step, read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Prompts laid one after another, each with `query_lengths[i]` queries and `key_lengths[i]` keys."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    # Whether a prompt's queries are the last ones of its keys' positions and see no later key; else they see all keys.
    causal: bool
    # [prompts + 1] int32 on the device: where each prompt's queries and keys begin; the last entry is their number.
    query_starts: torch.Tensor
    key_starts: torch.Tensor

    @property
    def queries(self) -> int:
        return sum(self.query_lengths)

    @property
    def keys(self) -> int:
        return sum(self.key_lengths)

    def ranges(self) -> list[tuple[slice, slice]]:
        """Per prompt, its queries and its keys."""
        queries, keys = accumulate(self.query_lengths), accumulate(self.key_lengths)
        lengths = zip(self.query_lengths, queries, self.key_lengths, keys, strict=True)
        return [(slice(stop - count, stop), slice(end - size, end)) for count, stop, size, end in lengths]


def plan_prefill(
    query_lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device, *, causal: bool = True
) -> PrefillPlan:
    """What all layers of one step share.

    Lengths are per prompt, queries at least 1. Causal prompts have at least as many keys as queries: cached ones first,
    then their own. Others have at least one key.
    """
    assert all(count >= 1 for count in query_lengths)
    assert all(size >= (count if causal else 1) for count, size in zip(query_lengths, key_lengths, strict=True))
    return PrefillPlan(
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(key_lengths),
        causal=causal,
        query_starts=_starts(query_lengths, device),
        key_starts=_starts(key_lengths, device),
    )


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    return starts if device.type == "cpu" else starts.pin_memory().to(device, non_blocking=True)

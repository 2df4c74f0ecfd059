"""The lengths of a step's prompts. Made once a step, read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels.hopper import is_hopper
from kernels.mla_prefill.tiles import cut_blocks, cut_tiles


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Prompts one after another; prompt i has `query_lengths[i]` queries and `key_lengths[i]` keys.

    A prompt's queries have the last positions of its keys and see no later key.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    # [prompts + 1] int32 on the device: the index of each prompt's first query and first key; last, their number.
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    # If true, queries, keys and values are multiplied in e4m3: see `mla_prefill`.
    quantized: bool
    # [tiles, 4] int32 on the device: `tiles.cut_tiles`. None where our Hopper kernels do not run.
    tiles: torch.Tensor | None
    # [blocks, 2] int32 on the device: `tiles.cut_blocks`. None where our Hopper kernels do not run or do not quantize.
    blocks: torch.Tensor | None
    # [1] int32 on the device, zero between calls: the Hopper kernels' own counter. Calls with the plan must not
    # overlap.
    taken: torch.Tensor | None

    @property
    def queries(self) -> int:
        return sum(self.query_lengths)

    @property
    def keys(self) -> int:
        return sum(self.key_lengths)

    def ranges(self) -> list[tuple[slice, slice]]:
        """For each prompt, the ranges of its queries and its keys."""
        queries, keys = accumulate(self.query_lengths), accumulate(self.key_lengths)
        lengths = zip(self.query_lengths, queries, self.key_lengths, keys, strict=True)
        return [(slice(stop - count, stop), slice(end - size, end)) for count, stop, size, end in lengths]


def plan_prefill(
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    device: torch.device,
    *,
    quantized: bool = False,
) -> PrefillPlan:
    """Make the plan that all layers of one step share.

    Each prompt has at least one query, and at least as many keys as queries: cached keys first, then its own.
    """
    assert all(1 <= count <= size for count, size in zip(query_lengths, key_lengths, strict=True))
    tiles = blocks = taken = None
    if device.type == "cuda" and is_hopper(device):
        cut = cut_tiles(query_lengths, key_lengths, in_blocks=quantized)
        tiles = _table(cut, 4, device)
        blocks = _table(cut_blocks(key_lengths), 2, device) if quantized else None
        taken = torch.zeros(1, dtype=torch.int32, device=device)
    return PrefillPlan(
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(key_lengths),
        query_starts=_starts(query_lengths, device),
        key_starts=_starts(key_lengths, device),
        quantized=quantized,
        tiles=tiles,
        blocks=blocks,
        taken=taken,
    )


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return _to_device(torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32), device)


def _table(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> torch.Tensor:
    return _to_device(torch.tensor(rows, dtype=torch.int32).view(len(rows), width), device)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)

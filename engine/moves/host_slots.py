"""Slots of host memory for KV blocks that leave the pool, and the copies there and back."""

import math
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mesh.memory.huge_pages import huge_memory
from transfer.memory import Done, Pending, Pool


class HostSlots(Protocol):
    """The bytes of `count` blocks outside the pool, next to a pool of blocks with as many layers. There may be more
    slots each time that one asks.

    Copies are carried out in the order of the calls. A block that is read or written belongs to the copy until it has
    completed: nothing else may write to it, and of one that is read back nothing else may read.
    """

    # Whether copies may complete after the call that begins them.
    completes_later: bool

    @property
    def count(self) -> int: ...

    def write(self, blocks: Sequence[int], slots: Sequence[int]) -> Pending[None]:
        """Copy each of the pool's `blocks`, with all layers, to the slot at the same place of `slots`."""
        ...

    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> Pending[float]:
        """Copy each of `slots` to the block of the pool at the same place of `blocks`. The result is how many seconds
        that took.
        """
        ...


class PlainSlots:
    """A `HostSlots` next to a pool that is in host memory too. Copies have completed when the call returns."""

    completes_later = False

    def __init__(self, planes: Sequence[Pool], count: int) -> None:
        """planes: of the pool, uint8 [layers, blocks, bytes of a block in a layer]. Raises MemoryError if there is no
        memory.
        """
        self.count = count
        self._planes = planes
        self._slots = [_zeros(count, plane.shape[0], plane.shape[2]) for plane in planes]

    def write(self, blocks: Sequence[int], slots: Sequence[int]) -> Done[None]:
        for plane, kept in zip(self._planes, self._slots, strict=True):
            for block, slot in zip(blocks, slots, strict=True):
                kept[slot] = plane[:, block]
        return Done(None)

    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> Done[float]:
        began = time.monotonic()
        for plane, kept in zip(self._planes, self._slots, strict=True):
            for slot, block in zip(slots, blocks, strict=True):
                plane[:, block] = kept[slot]
        return Done(time.monotonic() - began)


def _zeros(*shape: int) -> Pool:
    """Memory that is taken as it is first written, in huge pages: with small ones that would last 20 times as long as
    the copy. Raises MemoryError.
    """
    try:
        pages = huge_memory(math.prod(shape))
    except OSError as error:
        raise MemoryError(str(error)) from error
    return np.frombuffer(pages, np.uint8).reshape(shape)

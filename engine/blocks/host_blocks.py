"""Which KV blocks lie in a rank's host memory. The bytes themselves belong to `engine.moves.host_slots`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import msgspec

from engine.blocks.use_worth import UseWorth
from mesh.blocks import BLOCK_TOKENS

# With this many tokens before a token, its attention costs as much as everything else that is computed for it
# (DeepSeek R1: 5 MFLOP for each token before it, and 74 GFLOP).
ATTENTION_DOUBLES_TOKENS = 15_000
# More uses do not count: what was popular for long would stay for long after its last use.
MOST_USES = 8


class Evicted(msgspec.Struct, frozen=True):
    """A block whose content the pool forgets, or is about to forget."""

    block: int
    content: bytes
    # The content before it in its chain; empty at the root.
    parent: bytes
    # How many blocks of its chain are before it.
    index: int
    # Whether its draft layers are not whole.
    draftless: bool


@dataclass(slots=True)
class _Hosted:
    slot: int
    parent: bytes
    index: int
    draftless: bool
    # Reads that are planned or under way.
    pins: int = 0
    uses: int = 1
    # The least valuable is evicted first.
    value: float = 0.0


class HostBlocks:
    """Content addresses of `total` slots of host memory: the lower tier of a rank's KV, under its `BlockPool`.

    The least valuable block is evicted. A block's value is the time of its last use, plus the number of its uses times
    their worth and times what it costs to compute; the unit of time is one turnover, in which as many blocks come as
    there are slots (compare GreedyDual-Size-Frequency; Cherkasova 1998). So blocks that are used no more go in the end,
    whatever they cost. A block that another one here continues stays, since the other is found through it alone; so
    does one that is pinned, i.e. about to be read.
    """

    def __init__(self, total: int) -> None:
        """total: may grow."""
        self.total = total
        self._hosted: dict[bytes, _Hosted] = {}
        # How many blocks here continue each content, which need not be here itself.
        self._continued: Counter[bytes] = Counter()
        # Slots that were given back; those from `_fresh` on were never used.
        self._free: list[int] = []
        self._fresh = 0
        # Values at which blocks could be evicted. An entry counts while the block still has that value.
        self._evictable: list[tuple[float, bytes]] = []
        # How many blocks have come, and how many will have at the end of this turnover.
        self._came, self._turnover_end = 0, total
        self._use_worth = UseWorth()
        # Net change since `drain_changes`, in order.
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._hosted)

    def __contains__(self, content: object) -> bool:
        return content in self._hosted

    @property
    def pinned(self) -> int:
        """How many reads are planned or under way, over all blocks."""
        return sum(hosted.pins for hosted in self._hosted.values())

    def match_prefix(self, hashes: Iterable[bytes]) -> list[bytes]:
        """The leading part of a chain that is here. Pins none of it."""
        found = []
        for content in hashes:
            if content not in self._hosted:
                break
            found.append(content)
        return found

    def draftless_from(self, contents: Sequence[bytes]) -> int | None:
        """The first of these blocks whose draft layers are not whole; None if all are."""
        return next((index for index, content in enumerate(contents) if self._hosted[content].draftless), None)

    def slots(self, contents: Iterable[bytes]) -> list[int]:
        return [self._hosted[content].slot for content in contents]

    def add(self, evicted: Evicted) -> int | None:
        """The slot for the content, which takes the place of a less valuable one if there is no other. None if it is
        here already, or if all slots are pinned.
        """
        if evicted.content in self._hosted:
            return None
        slot = self._take_slot()
        if slot is None:
            return None
        uses = min(self._use_worth.came(evicted.content) + 1, MOST_USES)
        self._count_in()
        hosted = _Hosted(slot, evicted.parent, evicted.index, evicted.draftless, uses=uses)
        self._hosted[evicted.content] = hosted
        self._continued[evicted.parent] += 1
        self._set_value(evicted.content, hosted)
        _note(evicted.content, self._added, self._removed)
        return slot

    def pin(self, contents: Iterable[bytes]) -> None:
        """Keep these blocks, and their slots, until as many calls of `unpin`. Counts as a use."""
        for content in contents:
            hosted = self._hosted[content]
            hosted.pins += 1
            hosted.uses = min(hosted.uses + 1, MOST_USES)
            self._set_value(content, hosted)

    def unpin(self, contents: Iterable[bytes]) -> None:
        for content in contents:
            hosted = self._hosted[content]
            assert hosted.pins > 0
            hosted.pins -= 1
            self._offer(content, hosted)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The contents that came, and those that went, since the last call."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def _count_in(self) -> None:
        self._came += 1
        if self._came >= self._turnover_end:
            self._use_worth.end_turnover()
            self._turnover_end = self._came + self.total

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._fresh < self.total:
            self._fresh += 1
            return self._fresh - 1
        self._evict()
        return self._free.pop() if self._free else None

    def _evict(self) -> None:
        """Free the slot of the least valuable block, if there is one that can be evicted."""
        while self._evictable:
            value, content = heappop(self._evictable)
            hosted = self._hosted.get(content)
            if hosted is None or hosted.value != value or not self._can_evict(content, hosted):
                continue
            del self._hosted[content]
            self._use_worth.evicted(content, hosted.uses, self.total)
            self._free.append(hosted.slot)
            _note(content, self._removed, self._added)
            self._continued[hosted.parent] -= 1
            if not self._continued[hosted.parent]:
                del self._continued[hosted.parent]
                if (parent := self._hosted.get(hosted.parent)) is not None:
                    self._offer(hosted.parent, parent)
            return

    def _can_evict(self, content: bytes, hosted: _Hosted) -> bool:
        return not hosted.pins and content not in self._continued

    def _set_value(self, content: bytes, hosted: _Hosted) -> None:
        cost = 1 + hosted.index * BLOCK_TOKENS / ATTENTION_DOUBLES_TOKENS
        hosted.value = self._came / self.total + self._use_worth.turnovers * hosted.uses * cost
        self._offer(content, hosted)

    def _offer(self, content: bytes, hosted: _Hosted) -> None:
        """Note that the block can be evicted at its value, if it can."""
        if not self._can_evict(content, hosted):
            return
        heappush(self._evictable, (hosted.value, content))
        if len(self._evictable) > 64 + 4 * len(self._hosted):
            entries = {entry for entry in self._evictable if self._is_current(*entry)}
            self._evictable = list(entries)
            heapify(self._evictable)

    def _is_current(self, value: float, content: bytes) -> bool:
        hosted = self._hosted.get(content)
        return hosted is not None and hosted.value == value and self._can_evict(content, hosted)


def _note(content: bytes, change: dict[bytes, None], opposite: dict[bytes, None]) -> None:
    """Add the content to one kind of change, or take it out of the other."""
    if content in opposite:
        del opposite[content]
    else:
        change[content] = None

"""A worker's account of the KV blocks that its ranks hold, in which tier, and the events that tell of its changes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.protocol.messages import StepResult
from worker.events.batch import HOST, POOL, Batch, Cleared, Event, Removed, Stored
from worker.events.block_tokens import BlockText, BlockTokens
from worker.events.config import KvEventsConfig
from worker.events.log import EventLog

# Most blocks that one part of a snapshot, or one event, names: 150 KB with their tokens.
PART_BLOCKS = 512
# How long no part is made after another, in times what that took. To send it takes about as long as to make it.
REST = 2
# Most blocks that one batch names: a long prompt may come from a store in one step, and messages have limits.
BATCH_BLOCKS = 2048
# Blocks of live requests whose tokens are remembered until a rank reports them.
MOST_COMING = 65_536
_UNKNOWN = BlockText(b"", b"")
_MEDIA = (POOL, HOST)


@dataclass(slots=True)
class _Block:
    parent: bytes
    text: BlockText
    # A bit for each rank and medium that holds it.
    holders: int = 0


class KvEvents:
    """Used by one event loop. Blocks are told once a rank has reported them, and no later than the scheduler is."""

    def __init__(self, config: KvEventsConfig, ranks: int, clock: Callable[[], float] = time.time) -> None:
        """ranks: how many the worker has; `clock`: seconds since the epoch."""
        self.log = EventLog(config.kept_blocks, clock)
        self.tokens = BlockTokens(MOST_COMING)
        # In the order of their bits in `_Block.holders`.
        self._tiers = [(rank, medium) for rank in range(ranks) for medium in _MEDIA]
        self._making = asyncio.Lock()
        self._tells_tokens = config.token_ids
        self._clock = clock
        # Blocks that any rank holds, in the order in which they became known.
        self._blocks: dict[bytes, _Block] = {}

    def observe(self, rank: int, result: StepResult) -> None:
        """Note what a rank reports. Each tier's removals come before its additions."""
        for output in result.outputs:
            self.tokens.generated(output.key, output.first_position, output.token_ids)
            if output.finish is not None or output.refusal is not None:
                self.tokens.ended(output.key)
        parents = dict(zip(result.stored_blocks, result.stored_parents, strict=True))
        events = [
            *self._remove(rank, POOL, result.removed_blocks),
            *self._remove(rank, HOST, result.unhosted_blocks),
            *self._store(rank, POOL, result.stored_blocks, parents),
            *self._store(rank, HOST, result.hosted_blocks, {}),
        ]
        for content in (*result.removed_blocks, *result.unhosted_blocks):
            # Only now, because a block may have moved from one tier to the other.
            block = self._blocks.get(content)
            if block is not None and not block.holders:
                del self._blocks[content]
        for together in _batches(events):
            self.log.add(rank, together)

    async def batches(self, from_sequence: int) -> AsyncIterator[Batch]:
        """Every batch from this number on; first a snapshot, if it is 0 or that batch is not kept. A reader that is too
        slow for what is kept gets a snapshot again.
        """
        following = from_sequence
        while True:
            if not self.log.first <= following <= self.log.last + 1:
                async for part in self._paced(self._snapshot()):
                    following = part.sequence + 1
                    yield part
            elif (batch := self.log.batch(following)) is not None:
                following += 1
                yield batch
            else:
                await self.log.until(following)

    async def _paced(self, parts: Iterator[Batch]) -> AsyncIterator[Batch]:
        """One part at a time is made, for whatever subscriber: the event loop has requests to serve as well."""
        while True:
            async with self._making:
                began = time.perf_counter()
                part = next(parts, None)
                await asyncio.sleep(REST * (time.perf_counter() - began))
            if part is None:
                return
            yield part

    def _snapshot(self) -> Iterator[Batch]:
        """All blocks, in each tier parents first, in parts that take little time each. What changes while it is read is
        told by later batches, which may repeat what the snapshot tells already.
        """
        sequence, seconds, contents = self.log.last, self._clock(), list(self._blocks)
        yield Batch(sequence, seconds, 0, [Cleared()], snapshot=True, more=bool(contents))
        if not contents:
            return
        parts: dict[int, list[bytes]] = {_bit(rank, medium): [] for rank, medium in self._tiers}

        def told(bit: int) -> Batch:
            part, parts[bit] = parts[bit], []
            rank, medium = self._tiers[bit.bit_length() - 1]
            # Later batches tell of those that have gone meanwhile.
            left = [content for content in part if content in self._blocks]
            return Batch(sequence, seconds, rank, self._stored(left, medium), snapshot=True, more=True)

        for content in self._parents_first(contents):
            for bit in _bits(self._blocks[content].holders):
                parts[bit].append(content)
                if len(parts[bit]) == PART_BLOCKS:
                    yield told(bit)
        for bit in [bit for bit, part in parts.items() if part]:
            yield told(bit)
        yield Batch(sequence, seconds, 0, [], snapshot=True)

    def _remove(self, rank: int, medium: str, contents: Sequence[bytes]) -> list[Event]:
        bit, gone = _bit(rank, medium), []
        for content in contents:
            block = self._blocks.get(content)
            if block is not None and block.holders & bit:
                block.holders &= ~bit
                gone.append(content)
        return [Removed(part, medium) for part in _parts(gone)]

    def _store(self, rank: int, medium: str, contents: Sequence[bytes], parents: dict[bytes, bytes]) -> list[Event]:
        bit, new = _bit(rank, medium), []
        for content in contents:
            text = self.tokens.take(content)
            block = self._blocks.get(content)
            if block is None:
                block = self._blocks[content] = _Block(parents.get(content, b""), text or _UNKNOWN)
            elif text is not None:
                block.text = text
            if not block.holders & bit:
                block.holders |= bit
                new.append(content)
        return self._stored(new, medium)

    def _stored(self, contents: Sequence[bytes], medium: str) -> list[Event]:
        """One event for each run of blocks that follow one another."""
        runs: list[list[bytes]] = []
        for content in contents:
            if runs and len(runs[-1]) < PART_BLOCKS and self._follows(content, runs[-1][-1]):
                runs[-1].append(content)
            else:
                runs.append([content])
        return [self._event(run, medium) for run in runs]

    def _follows(self, content: bytes, before: bytes) -> bool:
        """Whether one event may name both: the tokens of both are known, or of neither."""
        block = self._blocks[content]
        return block.parent == before and bool(block.text.tokens) == bool(self._blocks[before].text.tokens)

    def _event(self, run: Sequence[bytes], medium: str) -> Stored:
        first, texts = self._blocks[run[0]], [self._blocks[content].text for content in run]
        tokens = b"".join(text.tokens for text in texts) if self._tells_tokens else b""
        return Stored(run, first.parent, tokens, first.text.root, medium)

    def _parents_first(self, contents: Sequence[bytes]) -> Iterator[bytes]:
        """Those of these blocks that are still here, each after its parent if that is here too."""
        told: set[bytes] = set()
        for content in contents:
            waiting = []
            while content in self._blocks and content not in told:
                waiting.append(content)
                told.add(content)
                content = self._blocks[content].parent
            yield from (each for each in reversed(waiting) if each in self._blocks)


def _bit(rank: int, medium: str) -> int:
    return 1 << (len(_MEDIA) * rank + _MEDIA.index(medium))


def _bits(number: int) -> Iterator[int]:
    while number:
        bit = number & -number
        yield bit
        number ^= bit


def _batches(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """The events in order, in as few batches as their limit allows."""
    together: list[Event] = []
    blocks = 0
    for event in events:
        named = event.named
        if together and blocks + named > BATCH_BLOCKS:
            yield together
            together, blocks = [], 0
        together.append(event)
        blocks += named
    if together:
        yield together


def _parts(contents: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(contents), PART_BLOCKS):
        yield contents[start : start + PART_BLOCKS]

"""How much of known prompts a rank's host memory still has, by what it evicts.

    python -m bench.host_eviction [--blocks 4000] [--requests 5000]

The directory of host memory (`engine.blocks.host_blocks`) without bytes, under requests that bring all of their
prompts' blocks. "Found" is the share of the blocks that came before and that are found as the beginning of a prompt,
in the last two thirds of the requests; "least recently used" is a directory that evicts by that alone.
"""

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from engine.blocks.host_blocks import Evicted, HostBlocks

# Requests of a session, the mean time from one to the next, in units in which one session begins, and the blocks that
# each adds.
TURNS, THINK, GROWTH = 8, 8.0, 2
SYSTEM_BLOCKS, SYSTEMS = 32, 40
# A prompt: the names of its blocks.
Prompt = Sequence[str]


def sessions(draw: random.Random, single: float = 0.0, shared: bool = False) -> Iterator[Prompt]:
    """Sessions that begin at random times, and single prompts as this share of all beginnings. shared: whether a
    session begins with one of a few system prompts.
    """
    began, coming = 0.0, list[tuple[float, int, int, int, int]]()
    number = 0
    while True:
        while not coming or coming[0][0] > began:
            began += draw.expovariate(1.0)
            number += 1
            turns = 1 if draw.random() < single else TURNS
            system = min(int(draw.paretovariate(1)), SYSTEMS)
            heapq.heappush(coming, (began, number, turns, draw.randint(20, 60), system))
        at, session, turns, blocks, system = heapq.heappop(coming)
        first = SYSTEM_BLOCKS if shared and turns > 0 else 0
        yield [f"system {system}.{i}" if i < first else f"{session}.{i}" for i in range(blocks)]
        if turns > 1:
            later = at + draw.expovariate(1 / THINK)
            heapq.heappush(coming, (later, session, turns - 1, blocks + GROWTH, system))


def documents(draw: random.Random, count: int, steepness: float, single: float) -> Iterator[Prompt]:
    """Questions about documents whose popularity is Zipf's, and single prompts as this share of all."""
    weights, sizes = [(i + 1) ** -steepness for i in range(count)], [draw.randint(10, 80) for _ in range(count)]
    number = 0
    while True:
        number += 1
        if draw.random() < single:
            yield [f"single {number}.{i}" for i in range(draw.randint(10, 80))]
        else:
            (document,) = draw.choices(range(count), weights)
            yield [f"document {document}.{i}" for i in range(sizes[document])]


LOADS: dict[str, Callable[[random.Random], Iterator[Prompt]]] = {
    "sessions": sessions,
    "sessions, 40 system prompts": lambda draw: sessions(draw, shared=True),
    "half of the beginnings single prompts": lambda draw: sessions(draw, single=0.5),
    "200 documents, Zipf 1, half single prompts": lambda draw: documents(draw, 200, 1.0, 0.5),
    "200 documents, Zipf 0.6, 70% single": lambda draw: documents(draw, 200, 0.6, 0.7),
    "1,000 documents, Zipf 1": lambda draw: documents(draw, 1000, 1.0, 0.0),
}


class OldestFirst:
    """Evicts what was used least recently."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def found(self, contents: Sequence[bytes]) -> int:
        """How many leading blocks are here; afterwards all are."""
        count = next((i for i, content in enumerate(contents) if content not in self._held), len(contents))
        # The end of a chain gives way first.
        for content in reversed(contents):
            self._held[content] = None
            self._held.move_to_end(content)
        while len(self._held) > self._blocks:
            self._held.popitem(last=False)
        return count


class AsServed:
    def __init__(self, blocks: int) -> None:
        self._host = HostBlocks(blocks)

    def found(self, contents: Sequence[bytes]) -> int:
        hits = self._host.match_prefix(contents)
        self._host.pin(hits)
        self._host.unpin(hits)
        for index, content in enumerate(contents):
            self._host.add(Evicted(0, content, contents[index - 1] if index else b"", index, False))
        return len(hits)


def share(directory: OldestFirst | AsServed, prompts: Iterator[Prompt], requests: int) -> float:
    seen, found, known = set[bytes](), 0, 0
    for number in range(requests):
        contents = [name.encode() for name in next(prompts)]
        came = next((i for i, content in enumerate(contents) if content not in seen), len(contents))
        hits = directory.found(contents)
        seen.update(contents)
        if number >= requests // 3:
            found, known = found + min(hits, came), known + came
    return found / max(known, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4000, help="of host memory")
    parser.add_argument("--requests", type=int, default=5000)
    given = parser.parse_args()
    table = Table(title=f"found, with {given.blocks:,} blocks", title_justify="left")
    for heading in ("requests", "as served", "least recently used"):
        table.add_column(heading)
    for name, load in LOADS.items():
        directories = AsServed(given.blocks), OldestFirst(given.blocks)
        found = (share(each, load(random.Random(0)), given.requests) for each in directories)
        table.add_row(name, *(f"{each:.0%}" for each in found))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""What the blocks that come again teach about those that were used often."""

import random

import pytest

from engine.blocks.host_blocks import Evicted, HostBlocks
from engine.blocks.use_worth import FIRST, LEAST, MOST, OFTEN, UseWorth


def turnovers(worth: UseWorth, count: int, often_back: int, seldom_back: int) -> None:
    """In each, ten blocks of both kinds are evicted, of which these numbers come again."""
    for _ in range(count):
        for uses, back in ((OFTEN, often_back), (1, seldom_back)):
            blocks = [random.randbytes(16) for _ in range(10)]
            for content in blocks:
                worth.evicted(content, uses, 100)
            for content in blocks[:back]:
                worth.came(content)
        worth.end_turnover()


@pytest.mark.parametrize(("often", "seldom", "expected"), [(5, 1, MOST), (0, 1, LEAST), (2, 2, FIRST)])
def test_uses_are_worth_what_evicted_blocks_teach(often: int, seldom: int, expected: float) -> None:
    worth = UseWorth()
    turnovers(worth, 10, often, seldom)
    assert worth.turnovers == expected


def test_what_was_learnt_first_gives_way() -> None:
    worth = UseWorth()
    turnovers(worth, 10, 5, 0)
    turnovers(worth, 10, 0, 5)
    assert worth.turnovers == LEAST


def test_only_as_many_evicted_blocks_are_remembered() -> None:
    worth = UseWorth()
    for number in range(5):
        worth.evicted(bytes([number]), OFTEN, 2)
    assert [worth.came(bytes([number])) for number in range(5)] == [0, 0, 0, OFTEN, OFTEN]


def found(host: HostBlocks, blocks: list[bytes]) -> int:
    """How many of a prompt's blocks are there; afterwards all are."""
    hits = host.match_prefix(blocks)
    host.pin(hits)
    host.unpin(hits)
    for index, content in enumerate(blocks):
        host.add(Evicted(0, content, blocks[index - 1] if index else b"", index, False))
    return len(hits)


def test_ended_sessions_give_way_to_those_that_go_on() -> None:
    host, draw, hits, known = HostBlocks(300), random.Random(0), 0, 0
    # Ten sessions at a time, of eight turns and 20 blocks.
    sessions = [(number, 0) for number in range(10)]
    for step in range(1500):
        place = draw.randrange(10)
        number, turn = sessions[place]
        again = found(host, [f"{number}.{index}".encode() for index in range(20)])
        if turn and step > 300:
            hits, known = hits + again, known + 20
        sessions[place] = (number, turn + 1) if turn < 7 else (step + 10, 0)
    assert hits > 0.9 * known


def test_documents_asked_for_often_outlast_single_prompts() -> None:
    host, draw, hits, asked = HostBlocks(200), random.Random(0), 0, 0
    for step in range(1200):
        # Twelve single prompts come from one question about a document to the next, and fill the memory.
        document = draw.randrange(8) if draw.random() < 0.4 else None
        name = f"single {step}" if document is None else f"document {document}"
        again = found(host, [f"{name}.{index}".encode() for index in range(20)])
        if step > 600 and document is not None:
            hits, asked = hits + again, asked + 20
    assert hits > 0.7 * asked

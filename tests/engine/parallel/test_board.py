"""Records that ranks show one another before each step."""

import struct
import threading
import time
from typing import Any

import pytest

from engine.parallel.layout import Layout
from engine.parallel.lockstep import NUMBERS
from engine.parallel.peers import Peers
from tests.support.rank_threads import on_each_rank

# A rank sleeps, after it has looked for the others' records, long before so many seconds are over.
ASLEEP = 0.2


def record(number: int) -> tuple[int, ...]:
    return (number,) * NUMBERS


def nobody() -> None:
    raise AssertionError("no rank rests")


def test_a_rank_gets_the_others_records_in_the_order_of_their_ranks() -> None:
    brought = on_each_rank(
        Layout(dp=3), lambda peers: [peers.steps.bring(record(10 * n + peers.place.rank), nobody) for n in range(50)]
    )
    for rank, rounds in enumerate(brought):
        others = [other for other in range(3) if other != rank]
        assert rounds == [[record(10 * n + other) for other in others] for n in range(50)]


def test_a_rank_that_sleeps_is_woken_by_the_record_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would look by itself after that.
    monkeypatch.setattr("engine.parallel.board.LOOK_SECONDS", 60.0)

    def act(peers: Peers) -> float:
        if peers.place.rank == 1:
            time.sleep(ASLEEP)
        started = time.monotonic()
        peers.steps.bring(record(1), nobody)
        return time.monotonic() - started

    waited, _ = on_each_rank(Layout(dp=2), act)
    assert ASLEEP / 2 < waited < 20


def test_a_rank_that_rests_is_woken_and_one_that_is_busy_is_not() -> None:
    rests, awake = threading.Event(), threading.Event()

    def act(peers: Peers) -> int:
        board, calls = peers.steps, 0
        if peers.place.rank == 1:
            assert not board.due
            rests.set()
            assert awake.wait(20) and board.due
            board.bring(record(0), nobody)
            # Busy, and late.
            time.sleep(ASLEEP)
            board.bring(record(1), nobody)
            return 0

        def wake() -> None:
            nonlocal calls
            calls += 1
            awake.set()

        assert rests.wait(20)
        board.bring(record(0), wake)
        first = calls
        board.bring(record(1), wake)
        assert calls == first
        return first

    woken, _ = on_each_rank(Layout(dp=2), act)
    assert woken >= 1


@pytest.mark.parametrize("missing", range(NUMBERS + 1))
def test_a_record_of_which_a_word_is_missing_is_not_there_yet(missing: int) -> None:
    """As a processor may show it that reorders what another wrote."""
    written = threading.Event()

    def act(peers: Peers) -> bool | None:
        fields: dict[str, Any] = vars(peers.steps)
        if peers.place.rank == 0:
            assert written.wait(20)
            return peers.steps.due
        own, _ = fields["_places"][1]
        words = [0, 1, *record(7), hash(record(7))]
        words[2 + missing] = 0
        struct.pack_into(f"{len(words)}q", fields["_map"], own, *words)
        written.set()
        return None

    assert on_each_rank(Layout(dp=2), act) == [False, None]

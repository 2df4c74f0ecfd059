"""Rows that yield one token or more are launched ahead and committed in order. No count exceeds its bound."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks.block_tables import BlockTables
from engine.blocks.kv_pool import BlockPool
from engine.requests.intake import make_request
from engine.requests.progress import Progress
from engine.requests.request import Request
from tests.support.engines import prompt_of, submit_of

TOTAL_BLOCKS = 64
# Most drafts of a row.
DRAFTS = 5
# Most rows in flight, which is more than the engine launches ahead.
AHEAD = 3


def filled(tokens: int, cached_blocks: int = 0) -> Progress:
    progress = Progress(range(tokens))
    blocks = range(-(-tokens // 64))
    progress.matched(blocks[:cached_blocks], blocks[cached_blocks:])
    return progress


def figures(progress: Progress) -> tuple[int, int, int, int, int]:
    tokens = len(progress.token_ids), progress.tokens_at_least, progress.tokens_at_most
    return (*tokens, progress.computed, progress.computed_at_most)


def test_a_matched_prefix_is_computed_and_registered() -> None:
    progress = filled(150, cached_blocks=2)
    assert figures(progress) == (150, 150, 150, 128, 128)
    assert (progress.registered_blocks, progress.left, progress.covered) == (2, 22, 192)


def test_a_launched_chunk_is_computed_once_it_is_committed() -> None:
    progress = filled(150)
    progress.launched(100, 0, 0)
    assert figures(progress) == (150, 150, 150, 0, 100)
    progress.committed(100, 0, ())
    assert figures(progress) == (150, 150, 150, 100, 100)


def test_a_row_with_drafts_counts_for_what_it_yields() -> None:
    progress = filled(100)
    progress.launched(100, 1, 7)
    assert (figures(progress), progress.drawing_row) == ((100, 101, 101, 0, 100), 7)
    progress.launched(4, 4, 2)
    assert (figures(progress), progress.drawing_row) == ((100, 102, 105, 0, 104), 2)
    progress.committed(100, 1, [1])
    progress.committed(4, 4, [2, 3])
    assert figures(progress) == (103, 103, 103, 102, 102)
    assert progress.left == 1


def test_a_result_of_an_ended_request_adds_no_tokens() -> None:
    progress = filled(10)
    progress.launched(10, 1, 0)
    progress.launched(3, 3, 0)
    progress.committed(10, 1, [5])
    progress.committed(3, 3, ())
    assert progress.token_ids[10:] == [5]
    assert (progress.rows_in_flight, progress.computed) == (0, 10)


def test_tokens_and_kv_arrive_in_either_order() -> None:
    for received_first in (True, False):
        progress = filled(100)
        if received_first:
            progress.received([1])
        progress.landed(100)
        if not received_first:
            progress.received([1])
        assert figures(progress) == (101, 101, 101, 100, 100)


def test_blocks_are_kept_while_a_row_writes_to_them() -> None:
    progress = filled(10)
    progress.launched(10, 1, 0)
    with pytest.raises(AssertionError):
        progress.reset()


def test_a_row_beyond_the_block_table_is_a_bug() -> None:
    progress = filled(64)
    progress.launched(64, 1, 0)
    with pytest.raises(AssertionError):
        progress.launched(1, 1, 0)


class ARequestOnItsWay(RuleBasedStateMachine):
    """One request through admission, chunks, rows with drafts, preemption and the end of unwanted rows."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL_BLOCKS)
        self.tables = BlockTables(self.pool, prefix_cache=True)
        self.request: Request = make_request(submit_of(1, prompt_of(300), 10_000), frozenset(), (0, 0))
        self.progress = self.request.progress
        # What the request should know: its tokens, and the bounds of its rows in flight.
        self.expected = prompt_of(300)
        self.in_flight: deque[tuple[int, int]] = deque()

    @precondition(lambda self: not self.progress.block_ids)
    @rule()
    def admit(self) -> None:
        cached = self.tables.match(self.request)
        self.pool.acquire(cached)
        self.tables.fill(self.request, cached)
        assert self.progress.computed == len(cached) * 64
        assert self.progress.covered >= len(self.expected)

    @precondition(lambda self: self.progress.block_ids and not self.in_flight and self.progress.left > 1)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        tokens = data.draw(st.integers(self.progress.computed, len(self.expected) - 1))
        self.progress.landed(tokens)

    @precondition(lambda self: self.progress.block_ids and self.progress.left > 1 and len(self.in_flight) < AHEAD)
    @rule(data=st.data())
    def launch_chunk(self, data: st.DataObject) -> None:
        left = self.progress.left
        computes = data.draw(st.integers(1, left))
        self._launch(computes, int(computes == left))

    @precondition(lambda self: self.progress.block_ids and self.progress.left == 1 and len(self.in_flight) < AHEAD)
    @rule(drafts=st.integers(0, DRAFTS))
    def launch_decode(self, drafts: int) -> None:
        while self.progress.computed_at_most + 1 + drafts > self.progress.covered:
            if not self.pool.can_allocate(1):
                return
            self.tables.grow([self.request])
        self._launch(1 + drafts, 1 + drafts)

    def _launch(self, computes: int, draws: int) -> None:
        at_most = self.progress.tokens_at_most
        self.progress.launched(computes, draws, 0)
        self.in_flight.append((computes, draws))
        assert self.progress.tokens_at_most == at_most + draws

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        computes, draws = self.in_flight.popleft()
        yielded = data.draw(st.lists(st.integers(0, 499), min_size=1, max_size=draws)) if draws else []
        self.progress.committed(computes, draws, yielded)
        self.expected += yielded
        self.tables.register(self.request)
        if draws and not self.in_flight:
            assert self.progress.computed == len(self.expected) - 1

    @precondition(lambda self: self.progress.block_ids and not self.in_flight)
    @rule()
    def preempt(self) -> None:
        self.tables.release(self.request)
        assert figures(self.progress) == (*[len(self.expected)] * 3, 0, 0)
        assert (self.progress.covered, self.progress.registered_blocks) == (0, 0)
        assert self.pool.free_blocks == TOTAL_BLOCKS

    @invariant()
    def what_is_confirmed_is_right_and_within_what_can_be(self) -> None:
        progress = self.progress
        assert progress.token_ids == self.expected
        assert progress.rows_in_flight == len(self.in_flight)
        drawing = [draws for _, draws in self.in_flight if draws]
        assert progress.tokens_at_least == len(self.expected) + len(drawing)
        assert progress.tokens_at_most == len(self.expected) + sum(drawing)
        assert progress.computed <= progress.computed_at_most <= progress.covered
        assert progress.computed < len(self.expected) and progress.left >= 1
        assert progress.registered_blocks * 64 <= progress.computed
        if not self.in_flight:
            assert progress.computed == progress.computed_at_most


TestARequestOnItsWay = ARequestOnItsWay.TestCase
TestARequestOnItsWay.settings = settings(max_examples=60, stateful_step_count=40)

"""The depth of drafts that is chosen for a step."""

from engine.drafts.config import MOST_DRAFTS
from engine.pace.draft_depth import DraftDepth
from engine.pace.step_times import StepTimes
from engine.protocol.messages import DraftCounts

# With one row a step takes as long with drafts as without. With 64 each draft takes as long as the step.
TIMES = StepTimes([1, 64], [[10.0] * 6, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]])


def counts(rows: int, right: int, verified: int = MOST_DRAFTS) -> DraftCounts:
    """The counts of `rows` rows that verified `verified` drafts each, the first `right` of which were accepted."""
    return DraftCounts(
        [rows * (place < verified) for place in range(MOST_DRAFTS)],
        [rows * (place < min(right, verified)) for place in range(MOST_DRAFTS)],
    )


def test_drafts_are_made_if_they_cost_less_than_steps() -> None:
    depth = DraftDepth(MOST_DRAFTS, TIMES)
    assert (depth.choose(1), depth.choose(64)) == (5, 0)
    # More rows than were measured; and a number between two measured ones, for which the larger one is used.
    assert (depth.choose(100), depth.choose(2)) == (0, 0)


def test_a_depth_whose_drafts_turn_out_wrong_is_given_up() -> None:
    times = StepTimes([1], [[10.0, 11.0, 12.0, 13.0, 14.0, 15.0]])
    depth = DraftDepth(MOST_DRAFTS, times)
    assert depth.choose(1) == 5
    for _ in range(50):
        depth.observe(counts(4, right=2))
    assert depth.choose(1) == 2
    for _ in range(1000):
        depth.observe(counts(4, right=0))
    assert depth.choose(1) == 0


def test_a_depth_that_was_given_up_is_tried_again() -> None:
    times = StepTimes([1], [[10.0, 11.0, 12.0, 13.0, 14.0, 15.0]])
    depth = DraftDepth(MOST_DRAFTS, times)
    for _ in range(100):
        depth.observe(counts(4, right=0))
    assert depth.choose(1) == 0
    for _ in range(2000):
        depth.observe(counts(4, right=0, verified=0))
    assert depth.choose(1) > 0


def test_no_more_drafts_are_made_than_asked_for() -> None:
    assert DraftDepth(2, StepTimes([1], [[10.0] * 3])).choose(1) == 2


def test_a_fixed_depth_is_kept_whatever_becomes_of_the_drafts() -> None:
    depth = DraftDepth(3, None)
    depth.observe(counts(1000, right=0))
    assert (depth.choose(1), depth.choose(64)) == (3, 3)

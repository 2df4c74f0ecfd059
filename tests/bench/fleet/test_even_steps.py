"""Whole prompts in a step and even steps, simulated with the costs that were measured."""

from bench.fleet.even_steps import COSTS, FORMS, USUAL, Rank, at_once, ran, row, saturation, stream_rows
from bench.meshes.http_peers import Lengths

LENGTHS = Lengths(4000, 100)
RANK = Rank(COSTS, 64, 8192)


def test_answers_get_their_tokens_evenly_beside_long_prompts() -> None:
    whole, _, even = (ran(RANK, LENGTHS, 8.0, 6.0, form).summary for form in FORMS)
    assert whole.completed == even.completed == whole.requests > 20
    assert whole.itl_ms is not None and even.itl_ms is not None
    assert whole.itl_ms.p99 > 1.5 * even.itl_ms.p99
    assert even.goodput.share == whole.goodput.share == 1


def test_saturation_is_the_highest_good_rate() -> None:
    rank = Rank(COSTS, 2, 8192)
    highest = saturation(rank, LENGTHS, 4.0)
    shares = [
        ran(rank, LENGTHS, rate, 4.0, USUAL, every_token=False).summary.goodput.share
        for rate in (highest, 1.1 * highest)
    ]
    assert shares[0] >= 0.99 > shares[1]


def test_even_steps_bring_streams_as_many_tokens() -> None:
    whole, even = (at_once(RANK, LENGTHS, 16, form).summary for form in FORMS[1:])
    assert whole.completed == even.completed == 16
    assert even.output_tokens_per_second > 0.97 * whole.output_tokens_per_second


def test_answers_that_run_count_with_streams() -> None:
    assert at_once(RANK, LENGTHS, 2, FORMS[-1], running=3).summary.completed == 5
    table = list(stream_rows(RANK, [LENGTHS], [2], running=3))
    assert [line.split(" | ")[1:3] for line in table[2:]] == [["2", "whole, captured"], ["2", "even, captured"]]


def test_a_row_names_its_load_and_steps() -> None:
    assert row(LENGTHS, 0.8, 6.0, FORMS[-1], ran(RANK, LENGTHS, 6.0, 3.0, FORMS[-1])).startswith(
        "| 4,000 in, 100 out | 0.8 (6) | even, captured | "
    )

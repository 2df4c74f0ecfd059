from math import exp, log

import pytest

from eval.answers import DocumentScore
from eval.comparison import compare, compare_perplexity, comparison_sheet, perplexity_note
from eval.results import Outcome, Result, perplexity_of, scores_of


def result_of(groups: dict[str, str], documents: dict[str, float] | None = None, problems: str = "same") -> Result:
    """`groups`: a digit a problem, 1 where it was solved. `documents`: nats of each, over ten tokens."""
    outcomes = [
        Outcome(f"{group}/{index}", f"{problems}-{group}-{index}", digit == "1", "stop", 10, 5)
        for group, digits in groups.items()
        for index, digit in enumerate(digits)
    ]
    scored = [DocumentScore(name, name, nats, 10) for name, nats in (documents or {}).items()]
    return Result(
        name="name",
        model="model",
        settings={},
        scores=scores_of(outcomes),
        perplexity=perplexity_of(scored),
        outcomes=outcomes,
        documents=scored,
    )


def test_the_same_problems_are_compared_one_by_one() -> None:
    first, second = result_of({"add": "1111111100"}), result_of({"add": "0000001111"})
    add, everything = compare(first, second)
    assert (add.only_first, add.only_second, add.paired) == (6, 2, True)
    # Two-sided binomial: 2 x (1 + 8 + 28) / 256.
    assert add.p == pytest.approx(74 / 256)
    assert (everything.group, everything.p) == ("all", add.p)


def test_different_problems_are_compared_by_their_shares() -> None:
    first, second = result_of({"add": "1" * 60 + "0" * 40}), result_of({"add": "1" * 45 + "0" * 55}, problems="other")
    add, _ = compare(first, second)
    assert (add.paired, add.only_first, add.only_second) == (False, None, None)
    assert add.p == pytest.approx(0.0337, abs=5e-5)


def test_more_problems_of_a_seed_are_other_problems() -> None:
    add, _ = compare(result_of({"add": "1111"}), result_of({"add": "11110"}))
    assert not add.paired


def test_many_groups_make_one_difference_less_surprising() -> None:
    groups = {"add": ("11111111", "00000000"), "copy": ("1111", "1111"), "sort": ("1010", "1010")}
    first, second = (result_of({name: pair[side] for name, pair in groups.items()}) for side in (0, 1))
    add, copy, sort, everything = compare(first, second)
    assert add.p == pytest.approx(2 / 256)
    assert add.family_p == pytest.approx(3 * 2 / 256)
    assert (copy.family_p, sort.family_p) == (1.0, 1.0)
    assert everything.family_p == everything.p == add.p


def test_only_groups_that_both_have_are_compared() -> None:
    first, second = result_of({"add": "11", "copy": "01"}), result_of({"copy": "11", "sort": "00"})
    assert [difference.group for difference in compare(first, second)] == ["copy", "all"]


def test_perplexities_are_compared_document_by_document() -> None:
    first = result_of({"add": "1"}, {"a": 20.0, "b": 40.0, "c": 30.0})
    second = result_of({"add": "1"}, {"a": 21.0, "b": 41.5, "c": 31.1})
    difference = compare_perplexity(first, second)
    assert difference is not None
    assert first.perplexity is not None and second.perplexity is not None
    assert difference.ratio == pytest.approx(second.perplexity.value / first.perplexity.value)
    assert difference.ratio == pytest.approx(exp(3.6 / 30))
    assert difference.interval.low < difference.ratio < difference.interval.high
    assert difference.p < 1e-6, "every document became less likely, though they differ a lot among themselves"


def test_a_difference_in_both_directions_may_be_chance() -> None:
    first = result_of({"add": "1"}, {"a": 20.0, "b": 20.0, "c": 20.0})
    second = result_of({"add": "1"}, {"a": 22.0, "b": 19.0, "c": 20.0})
    difference = compare_perplexity(first, second)
    assert difference is not None and difference.p > 0.5
    assert difference.interval.low < 1 < difference.interval.high


def test_texts_that_only_one_scored_do_not_count() -> None:
    first = result_of({"add": "1"}, {"a": 10 * log(4), "b": 10 * log(4), "c": 99.0})
    second = result_of({"add": "1"}, {"a": 10 * log(2), "b": 10 * log(2)})
    difference = compare_perplexity(first, second)
    assert difference is not None and difference.ratio == pytest.approx(0.5)


@pytest.mark.parametrize("documents", [None, {"a": 1.0}])
def test_nothing_is_said_of_perplexities_that_were_not_measured(documents: dict[str, float] | None) -> None:
    both = {"a": 1.0, "b": 1.0}
    assert compare_perplexity(result_of({"add": "1"}, documents), result_of({"add": "1"}, both)) is None


def test_the_table_shows_the_difference_in_points_and_its_significance() -> None:
    first, second = result_of({"add": "1111111110"}), result_of({"add": "0000000010"})
    sheet = comparison_sheet(compare(first, second))
    assert sheet.rows[0] == ("add", "90.0%", "10.0%", "-80.0", "8", "0", "0.008", "0.008")
    assert sheet.rows[1] == ("all", "90.0%", "10.0%", "-80.0", "8", "0", "0.008", "-")


def test_the_perplexities_are_compared_in_a_sentence() -> None:
    difference = compare_perplexity(
        result_of({"add": "1"}, {"a": 10 * log(4), "b": 10 * log(4)}),
        result_of({"add": "1"}, {"a": 10 * log(5), "b": 10 * log(5)}),
    )
    assert difference is not None
    assert "1.2500 times that of A (95% interval 1.2500 to 1.2500, p <0.001)" in perplexity_note(difference)

"""Compares two results: by how much each group differs, and whether that could be chance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

from eval.results import ALL, Outcome, Result, Score
from eval.statistics import Interval, holm, mcnemar, mean_interval, mean_is_zero, two_proportions
from eval.tables import Sheet, percent, probability


@dataclass(frozen=True)
class Difference:
    """One group in both results."""

    group: str
    first: Score
    second: Score
    # Whether both were asked the same problems. Then each problem is compared with itself, otherwise only the shares.
    paired: bool
    # How many problems only the first solved, and only the second; None if they were asked different problems.
    only_first: int | None
    only_second: int | None
    # Probability of such a difference if the two are equally good.
    p: float
    # The same after Holm's correction for the number of groups; all questions together are not corrected.
    family_p: float


@dataclass(frozen=True)
class PerplexityDifference:
    """`ratio`: the second result's perplexity over the first's, on the same documents."""

    ratio: float
    interval: Interval
    p: float


def compare(first: Result, second: Result) -> list[Difference]:
    """Every group that both have, in the first's order."""
    scores = {score.group: score for score in second.scores}
    found = [
        _difference(score, scores[score.group], _members(first, score.group), _members(second, score.group))
        for score in first.scores
        if score.group in scores
    ]
    groups = [difference for difference in found if difference.group != ALL]
    adjusted = holm([difference.p for difference in groups])
    corrected = [replace(difference, family_p=p) for difference, p in zip(groups, adjusted, strict=True)]
    return corrected + [difference for difference in found if difference.group == ALL]


def compare_perplexity(first: Result, second: Result) -> PerplexityDifference | None:
    """Compare over the documents that both scored with the same number of tokens; None if these are fewer than two."""
    known = {document.digest: document for document in second.documents}
    pairs = [(document, known[document.digest]) for document in first.documents if document.digest in known]
    pairs = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    if len(pairs) < 2:
        return None
    # Each document's share of the difference in nats per token, so that their mean is the difference over all tokens.
    tokens = sum(one.tokens for one, _ in pairs) / len(pairs)
    changes = [(other.negative_log_likelihood - one.negative_log_likelihood) / tokens for one, other in pairs]
    interval = mean_interval(changes)
    return PerplexityDifference(
        ratio=exp(sum(changes) / len(changes)),
        interval=Interval(exp(interval.low), exp(interval.high)),
        p=mean_is_zero(changes),
    )


def _members(result: Result, group: str) -> dict[str, Outcome]:
    """The outcomes of a group by the digest of what was asked. A group's problems are all different."""
    return {outcome.digest: outcome for outcome in result.outcomes if group in (outcome.group, ALL)}


def _difference(first: Score, second: Score, ours: dict[str, Outcome], theirs: dict[str, Outcome]) -> Difference:
    if ours.keys() != theirs.keys():
        p = two_proportions(first.right, first.total, second.right, second.total)
        return Difference(first.group, first, second, False, None, None, p, p)
    only_first = sum(ours[digest].right and not theirs[digest].right for digest in ours)
    only_second = sum(theirs[digest].right and not ours[digest].right for digest in ours)
    p = mcnemar(only_first, only_second)
    return Difference(first.group, first, second, True, only_first, only_second, p, p)


def comparison_sheet(differences: Sequence[Difference]) -> Sheet:
    """A is the first result, B the second; differences are in percentage points."""
    sheet = Sheet(("task", "A", "B", "B - A", "only A", "only B", "p", "p of the family"))
    for each in differences:
        sheet.add(
            each.group,
            percent(each.first.share),
            percent(each.second.share),
            f"{(each.second.share - each.first.share) * 100:+.1f}",
            "-" if each.only_first is None else str(each.only_first),
            "-" if each.only_second is None else str(each.only_second),
            probability(each.p),
            "-" if each.group == ALL else probability(each.family_p),
        )
    return sheet


def perplexity_note(difference: PerplexityDifference) -> str:
    interval = difference.interval
    return (
        f"Perplexity of B is {difference.ratio:.4f} times that of A "
        f"(95% interval {interval.low:.4f} to {interval.high:.4f}, p {probability(difference.p)})"
    )

"""One result as text to read."""

from eval.results import Perplexity, Result, Score
from eval.tables import Sheet, percent, span


def score_sheet(result: Result) -> Sheet:
    """Exact match by group, with its confidence interval and the counts behind it."""
    sheet = Sheet(("task", "exact match", "95% CI", "right", "prompt tokens", "answer tokens", "cut off"))
    for score in result.scores:
        sheet.add(*_cells(score))
    return sheet


def _cells(score: Score) -> tuple[str, ...]:
    return (
        score.group,
        percent(score.share),
        span(score.low, score.high),
        f"{score.right}/{score.total}",
        f"{score.mean_prompt_tokens:.0f}",
        f"{score.mean_answer_tokens:.0f}",
        str(score.cut_off),
    )


def notes(result: Result) -> list[str]:
    """Lines below the table: the perplexity, and the questions that were not answered."""
    lines = []
    if result.perplexity is not None:
        lines.append(f"Perplexity of held-out text: {perplexity_text(result.perplexity)}")
    elif result.without_perplexity:
        lines.append(f"Perplexity: {result.without_perplexity}")
    if refused := result.scores[-1].refused:
        lines.append(f"{refused} questions were refused, most likely for their length, and count as wrong.")
    return lines


def perplexity_text(perplexity: Perplexity) -> str:
    return f"{perplexity.value:.3f} ({perplexity.tokens:,} tokens of {perplexity.documents} documents)"


def markdown(result: Result) -> str:
    """The result as a whole page of Markdown."""
    asked = ", ".join(f"{key} {value}" for key, value in result.settings.items() if value not in (None, []))
    return "\n".join(
        [f"# {result.model}", "", f"Settings: {asked}.", "", score_sheet(result).markdown(), *notes(result), ""]
    )

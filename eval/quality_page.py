"""Writes docs/quality.md: the results of several configurations as one table, task by configuration."""

from collections.abc import Sequence
from pathlib import Path

from eval import results
from eval.comparison import compare, compare_perplexity
from eval.results import Perplexity, Result, Score
from eval.tables import Sheet, percent, span

SIGNIFICANT = 0.05
MARK = " *"
PAGE = """\
# Quality

What each technique costs in accuracy, measured on {total} problems that the model was not trained on (`eval/tasks/`,
seed {seed}), answered greedily through a whole mesh. Made by:

```
{command}
```

A cell is the share of exact matches with its 95% interval (Wilson). Those marked with * differ from the first column by
more than chance: p below {significant} in McNemar's exact test on the same problems, corrected for the number of tasks
(Holm). Long tasks are named with the length of their prompt in tokens. Perplexity is that of docstrings which training
held out. The first column multiplies the published FP8 weights in bfloat16; in the others activations are quantized
too, by Hopper's kernels or, on a CPU, by the references that define them. NVFP4 leaves activations in bfloat16.

{table}
{configurations}

Every outcome lies in `{folder}/`; `deepmesh eval --compare A.json B.json` sets two of them side by side.

What drafts cost, strict and relaxed, is in [drafts.md](drafts.md). A CPU computed [quality.md](quality.md), and an
H200 [quality-gpu.md](quality-gpu.md).
"""


def write(found: Sequence[Result], path: Path, command: str) -> None:
    """Write the page to `path`, and next to it a folder with each result for `deepmesh eval --compare`."""
    folder = path.with_suffix("")
    for result in found:
        results.save(result, folder / f"{file_name(result.name)}.json")
    path.write_text(_page(found, folder.name, command), encoding="utf-8")


def file_name(configuration: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in configuration.lower()).split())


def quality_sheet(found: Sequence[Result]) -> Sheet:
    """One row for each task, one column for each result. Cells that differ from the first column by more than chance
    are marked.
    """
    sheet = Sheet(("task", *(result.name for result in found)))
    columns = [_cells(found[0], set()), *(_cells(result, _differing(found[0], result)) for result in found[1:])]
    for score in found[0].scores:
        sheet.add(score.group, *(column.get(score.group, "-") for column in columns))
    sheet.add("perplexity", *(_perplexity_cell(found[0], result) for result in found))
    return sheet


def _cells(result: Result, marked: set[str]) -> dict[str, str]:
    return {score.group: _cell(score) + (MARK if score.group in marked else "") for score in result.scores}


def _cell(score: Score) -> str:
    return f"{percent(score.share)} ({span(score.low, score.high)})"


def _differing(first: Result, other: Result) -> set[str]:
    return {difference.group for difference in compare(first, other) if difference.family_p < SIGNIFICANT}


def _perplexity_cell(first: Result, result: Result) -> str:
    if result.perplexity is None:
        return "-"
    text = _perplexity(result.perplexity)
    difference = compare_perplexity(first, result)
    return text + (MARK if difference is not None and difference.p < SIGNIFICANT else "")


def _perplexity(perplexity: Perplexity) -> str:
    return f"{perplexity.value:.3f}"


def _page(found: Sequence[Result], folder: str, command: str) -> str:
    return PAGE.format(
        seed=found[0].settings["seed"],
        total=found[0].scores[-1].total,
        command=command,
        significant=SIGNIFICANT,
        table=quality_sheet(found).markdown(),
        configurations="\n".join(f"- {result.name}: {_described(result)}" for result in found),
        folder=folder,
    )


def _described(result: Result) -> str:
    settings = ", ".join(f"`--set {setting}`" for setting in result.settings["settings"])
    return f"`{result.settings['model_dir']}`" + (f" with {settings}" if settings else "")

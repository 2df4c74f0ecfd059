"""`deepmesh eval`: how good the model of any OpenAI-compatible endpoint is."""

import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.endpoints import ApiKeyOption
from launcher.shipped_model import shipped_model
from mesh.config_values import validate

if TYPE_CHECKING:
    from eval.perplexity import Document


def evaluate(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint; a mesh serves it for the evaluation.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Instead: an OpenAI API, e.g. http://127.0.0.1:8000/v1.")] = None,
    suite: Annotated[str, typer.Option(help="short, long (prompts of 1k to 16k tokens), or all.")] = "short",
    problems: Annotated[int, typer.Option(help="Problems of each short task.")] = 50,
    long_problems: Annotated[int, typer.Option(help="Problems of each long task and length.")] = 20,
    seed: Annotated[int, typer.Option(help="Equal seeds ask the same problems.")] = 0,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer; by default 1024, long 512.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability that is drawn from.")] = 1.0,
    perplexity: Annotated[bool, typer.Option(help="Also of held-out text, if the endpoint can.")] = True,
    concurrency: Annotated[int, typer.Option(help="Questions in flight at once.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer, its waiting included.")] = 3600,
    served_model: Annotated[str | None, typer.Option(help="By default the first that the endpoint lists.")] = None,
    api_key: ApiKeyOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SERVICE.KEY=VALUE", help="A setting of the mesh; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Answers and result; by default out/eval/<model>-<suite>.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Only set two result.json side by side.")
    ] = None,
    matrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Evaluate every configuration, as docs/quality.md has them.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="FORM=DIR", help="For --matrix: where fp8, w4a8, w4a8-awq, nvfp4, v32 lie; repeatable."),
    ] = None,
) -> None:
    """Ask problems whose answers can be checked, and report exact match by task with confidence intervals.

    If a run was stopped, start it again with the same options and it continues.
    """
    console = Console(highlight=False)
    if compare is not None:
        _compare(compare, console)
        return
    values = {
        "url": url,
        "model_dir": shipped_model() if model is None and url is None else model,
        "served_model": served_model,
        "api_key": api_key,
        "settings": tuple(settings or ()),
        "suite": suite,
        "problems": problems,
        "long_problems": long_problems,
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "concurrency": concurrency,
        "timeout_s": timeout,
        "out": out,
    }
    if matrix is not None:
        _matrix(values, perplexity, checkpoint or (), matrix, console)
    else:
        _one(values, perplexity, console)


def _one(values: dict[str, Any], perplexity: bool, console: Console) -> None:
    from eval import evaluation, report
    from eval.options import EvalOptions

    options = asyncio.run(evaluation.named(validate(EvalOptions, values, "eval")))
    result = asyncio.run(evaluation.evaluate(options, _documents(perplexity, console), console))
    console.print(report.score_sheet(result).terminal(f"{result.model}, {options.suite}"))
    for note in report.notes(result):
        console.print(note)
    console.print(
        f"saved {options.directory / evaluation.RESULT_FILE} and {options.directory / evaluation.REPORT_FILE}"
    )


def _matrix(values: dict[str, Any], perplexity: bool, named: Sequence[str], page: Path, console: Console) -> None:
    from eval import matrix, quality_page
    from eval.options import EvalOptions

    forms = matrix.checkpoints(named)
    out = values["out"] or Path("out/eval/matrix")
    options = validate(EvalOptions, {**values, "model_dir": forms["fp8"], "out": out}, "eval")
    documents = _documents(perplexity, console)
    found = asyncio.run(matrix.evaluate_matrix(options, forms, documents, console))
    commands = [*matrix.preparation(forms, forms), shlex.join(["deepmesh", *sys.argv[1:]])]
    quality_page.write(found, page, "\n".join(commands))
    console.print(quality_page.quality_sheet(found).terminal("quality"))
    console.print(f"wrote {page}")


def _compare(paths: tuple[Path, Path], console: Console) -> None:
    from eval import comparison, results

    first, second = (results.load(path) for path in paths)
    sheet = comparison.comparison_sheet(comparison.compare(first, second))
    console.print(sheet.terminal(f"A: {paths[0]} ({first.model})\nB: {paths[1]} ({second.model})"))
    if (difference := comparison.compare_perplexity(first, second)) is not None:
        console.print(comparison.perplexity_note(difference))


def _documents(wanted: bool, console: Console) -> "list[Document]":
    """Documents from Python's library documentation that training leaves out; none unless `wanted`."""
    from eval.library_text import library_entries
    from eval.perplexity import LONGEST_CHARACTERS, Document

    if not wanted:
        return []
    with console.status("reading held-out text"):
        held_out = [entry for entry in library_entries() if entry.is_held_out]
    return [Document(entry.name, entry.document[:LONGEST_CHARACTERS]) for entry in held_out]

from pathlib import Path

from eval import results
from eval.answers import DocumentScore
from eval.quality_page import file_name, quality_sheet, write
from eval.results import Outcome, Result, perplexity_of, scores_of
from eval.tables import Sheet

GROUPS = ("add", "needle 8k")


def result_of(name: str, wrong: int, nats: float | None = None) -> Result:
    """Forty problems of each group, of which the first `wrong` were missed; two documents of ten tokens."""
    outcomes = [
        Outcome(f"{group}/{index}", f"{group} {index}", index >= wrong, "stop", 10, 5)
        for group in GROUPS
        for index in range(40)
    ]
    documents = [] if nats is None else [DocumentScore(each, each, nats, 10) for each in ("a", "b")]
    return Result(
        name=name,
        model="tiny",
        settings={"seed": 0, "model_dir": f"models/{name}", "settings": ["decode.engine.threads=1"] if wrong else []},
        scores=scores_of(outcomes),
        perplexity=perplexity_of(documents),
        outcomes=outcomes,
        documents=documents,
    )


def test_a_task_is_a_row_and_a_configuration_a_column() -> None:
    sheet = quality_sheet([result_of("bf16", 0), result_of("FP8 weights", 4)])
    assert sheet.headings == ("task", "bf16", "FP8 weights")
    assert [row[0] for row in sheet.rows] == [*GROUPS, "all", "perplexity"]
    assert sheet.rows[0] == ("add", "100.0% (91-100%)", "90.0% (77-96%)")


def test_cells_that_differ_by_more_than_chance_are_marked() -> None:
    sheet = quality_sheet([result_of("a", 0, 10.0), result_of("b", 20, 10.0), result_of("c", 1, 12.0)])
    marked = [[cell.endswith(" *") for cell in row[1:]] for row in sheet.rows]
    assert marked == [[False, True, False], [False, True, False], [False, True, False], [False, False, True]]


def test_a_perplexity_that_was_not_measured_is_left_open() -> None:
    sheet = quality_sheet([result_of("a", 0, 10.0), result_of("b", 0)])
    assert sheet.rows[-1] == ("perplexity", "2.718", "-")


def test_the_page_keeps_its_results_and_how_they_came(tmp_path: Path) -> None:
    found = [result_of("bf16", 0, 10.0), result_of("FP8 weights, FP8 KV", 4, 10.5)]
    write(found, tmp_path / "quality.md", "deepmesh eval --matrix docs/quality.md")
    page = (tmp_path / "quality.md").read_text()
    assert "deepmesh eval --matrix docs/quality.md" in page
    assert "- FP8 weights, FP8 KV: `models/FP8 weights, FP8 KV` with `--set decode.engine.threads=1`" in page
    assert quality_sheet(found).markdown() in page
    assert results.load(tmp_path / "quality/fp8-weights-fp8-kv.json") == found[1]


def test_a_name_becomes_a_file_name() -> None:
    assert file_name("FP8 weights, FP8 KV") == "fp8-weights-fp8-kv"


def test_markdown_columns_are_aligned() -> None:
    sheet = Sheet(("task", "share"))
    sheet.add("add", "9%")
    sheet.add("multiply", "100%")
    assert sheet.markdown() == (
        "| task     | share |\n"
        "| -------- | ----: |\n"
        "| add      |    9% |\n"
        "| multiply |  100% |\n"
    )  # fmt: skip

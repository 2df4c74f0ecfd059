import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli.commands import build
from eval import results
from eval.suite import questions
from mesh.errors import ConfigError
from tests.support.answering_server import AnsweringServer, serving


def deepmesh_eval(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(build(), ["eval", *map(str, arguments)])


async def evaluate_server(server: AnsweringServer, out: Path, *arguments: str) -> Result:
    async with serving(server.app) as url:
        given = ["--url", url, "--out", str(out), "--problems", "2", "--no-perplexity", *arguments]
        return await asyncio.to_thread(deepmesh_eval, *given)


def short_questions() -> AnsweringServer:
    return AnsweringServer(questions("short", seed=0, problems=2), wrong={"add/0"})


async def test_an_endpoint_is_evaluated_and_its_result_saved(tmp_path: Path) -> None:
    done = await evaluate_server(short_questions(), tmp_path)
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if "│ add" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][:4] == ["add", "50.0%", "9-91%", "1/2"]
    assert "pupil, short" in done.output
    assert results.load(tmp_path / "result.json").scores[0].right == 1
    assert "| add " in (tmp_path / "report.md").read_text()


async def test_results_lie_by_default_where_the_models_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = short_questions()
    server.model = "deepseek-ai/DeepSeek-R1"
    async with serving(server.app) as url:
        done = await asyncio.to_thread(deepmesh_eval, "--url", url, "--problems", "2", "--no-perplexity")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out/eval/deepseek-ai-DeepSeek-R1-short/result.json").exists()


async def test_two_results_are_compared(tmp_path: Path) -> None:
    await evaluate_server(short_questions(), tmp_path / "a")
    await evaluate_server(AnsweringServer(questions("short", seed=0, problems=2)), tmp_path / "b")
    done = deepmesh_eval("--compare", tmp_path / "a/result.json", tmp_path / "b/result.json")
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if "│ add" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["add", "50.0%", "100.0%", "+50.0", "0", "1", "1.000", "1.000"]


def test_options_that_disagree_are_one_clear_error(tmp_path: Path) -> None:
    done = deepmesh_eval("--model", tmp_path, "--url", "http://127.0.0.1:1/v1")
    assert isinstance(done.exception, ConfigError)
    assert "name what to evaluate: --model DIR or --url" in done.exception.message

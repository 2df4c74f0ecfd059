import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval import results
from eval.evaluation import evaluate, named
from eval.options import EvalOptions
from eval.perplexity import Document
from eval.results import Result
from eval.suite import Question, questions
from mesh.errors import ConfigError, EndpointUnavailable
from tests.support.answering_server import AnsweringServer, serving

PROBLEMS = 3
DOCUMENTS = [Document("a", "first text"), Document("b", "second")]


@cache
def asked() -> list[Question]:
    return questions("short", seed=0, problems=PROBLEMS)


async def evaluate_at(url: str, out: Path, documents: list[Document] = DOCUMENTS, **values: Any) -> Result:
    options = EvalOptions.model_validate({"url": url, "problems": PROBLEMS, "out": out, **values})
    return await evaluate(await named(options), documents, Console(file=io.StringIO()))


async def run(server: AnsweringServer, out: Path, **values: Any) -> Result:
    async with serving(server.app) as url:
        return await evaluate_at(url, out, **values)


async def test_right_and_wrong_answers_are_counted_by_task(tmp_path: Path) -> None:
    server = AnsweringServer(asked(), wrong={"add/0", "add/2", "look_up/1"})
    result = await run(server, tmp_path)
    shares = {score.group: (score.right, score.total) for score in result.scores}
    assert shares.pop("add") == (1, 3)
    assert shares.pop("look_up") == (2, 3)
    assert shares.pop("all") == (15 * 3 - 3, 15 * 3)
    assert set(shares.values()) == {(3, 3)}
    assert result.model == "pupil"


async def test_what_was_cut_off_or_refused_is_told(tmp_path: Path) -> None:
    server = AnsweringServer(asked())
    server.refused, server.cut_off = {"add/0"}, {"add/1", "divide/0"}
    result = await run(server, tmp_path)
    add, everything = result.scores[0], result.scores[-1]
    assert (add.right, add.refused, add.cut_off) == (2, 1, 1)
    assert (everything.right, everything.refused, everything.cut_off) == (44, 1, 2)
    assert "1 questions were refused" in (tmp_path / "report.md").read_text()


async def test_a_stopped_run_continues_as_if_undisturbed(tmp_path: Path) -> None:
    server = AnsweringServer(asked(), wrong={"subtract/1"})
    async with serving(server.app) as url:
        server.left = 20
        with pytest.raises(EndpointUnavailable, match="out of order"):
            await evaluate_at(url, tmp_path / "stopped")
        answered = re.findall(r'"question":"([^"]+)"', (tmp_path / "stopped/answers.jsonl").read_text())
        assert 0 < len(answered) <= 20
        server.left = None
        server.bodies.clear()
        gone_on = await evaluate_at(url, tmp_path / "stopped")
        assert sorted(server.asked) == sorted(question.id for question in asked() if question.id not in answered)
        assert gone_on == await evaluate_at(url, tmp_path / "whole")


async def test_a_finished_run_asks_nothing_again(tmp_path: Path) -> None:
    server = AnsweringServer(asked())
    server.echoes = True
    async with serving(server.app) as url:
        first = await evaluate_at(url, tmp_path)
        server.bodies.clear()
        assert await evaluate_at(url, tmp_path) == first
    assert server.bodies == []


async def test_another_seed_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with serving(AnsweringServer(asked()).app) as url:
        await evaluate_at(url, tmp_path)
        with pytest.raises(ConfigError, match=r"\(seed 0, now 1\)"):
            await evaluate_at(url, tmp_path, seed=1)


async def test_problems_that_changed_since_are_refused(tmp_path: Path) -> None:
    (digest,) = (question.digest for question in asked() if question.id == "divide/1")
    log = tmp_path / "answers.jsonl"
    async with serving(AnsweringServer(asked()).app) as url:
        await evaluate_at(url, tmp_path)
        log.write_text(log.read_text().replace(digest, "0" * len(digest)))
        with pytest.raises(ConfigError, match=r"changed since divide/1 was answered"):
            await evaluate_at(url, tmp_path)


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_no_more_questions_are_in_flight_than_allowed(tmp_path: Path, concurrency: int) -> None:
    server = AnsweringServer(asked())
    await run(server, tmp_path, concurrency=concurrency)
    assert min(2, concurrency) <= server.most_in_flight <= concurrency


async def test_sampled_answers_have_seeds_of_their_own_that_return(tmp_path: Path) -> None:
    first, second = AnsweringServer(asked()), AnsweringServer(asked())
    await run(first, tmp_path / "1", temperature=0.6)
    await run(second, tmp_path / "2", temperature=0.6)
    seeds = {body["messages"][0]["content"]: body["seed"] for body in first.bodies if "messages" in body}
    assert len(set(seeds.values())) == len(seeds)
    assert seeds == {body["messages"][0]["content"]: body["seed"] for body in second.bodies if "messages" in body}


async def test_perplexity_is_measured_where_the_endpoint_echoes(tmp_path: Path) -> None:
    server = AnsweringServer(asked())
    server.echoes = True
    result = await run(server, tmp_path)
    assert result.perplexity is not None
    assert result.perplexity.value == pytest.approx(4.0)
    assert (result.perplexity.tokens, result.perplexity.documents) == (9 + 5, 2)


async def test_no_perplexity_is_invented_where_the_endpoint_offers_none(tmp_path: Path) -> None:
    result = await run(AnsweringServer(asked()), tmp_path)
    assert result.perplexity is None
    assert "not offered by this endpoint" in (tmp_path / "report.md").read_text()


async def test_no_perplexity_is_mentioned_where_none_was_asked_for(tmp_path: Path) -> None:
    server = AnsweringServer(asked())
    result = await run(server, tmp_path, documents=[])
    assert (result.perplexity, result.without_perplexity) == (None, None)
    assert all("messages" in body for body in server.bodies)


async def test_a_result_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    server = AnsweringServer(asked(), wrong={"add/0"})
    server.echoes = True
    result = await run(server, tmp_path)
    assert results.load(tmp_path / "result.json") == result


@pytest.mark.parametrize(("content", "complaint"), [(None, "cannot read"), ('{"scores": []}', "is no result of")])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        results.load(path)

from pathlib import Path
from typing import Any

import pytest

from eval.answers import Answer, AnswerLog, DocumentScore
from mesh.errors import ConfigError

SETTINGS: dict[str, Any] = {"seed": 0, "suite": "short"}


def answer(question: str, *, right: bool = True) -> Answer:
    return Answer(question, "d1", right, "stop", 10, 5, "**4**\nand a line\r", "2+2\n")


def reopened(path: Path, settings: dict[str, Any] = SETTINGS) -> AnswerLog:
    with AnswerLog(path, settings) as log:
        return log


def test_answers_and_scores_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    score = DocumentScore("json.dumps", "d2", 12.5, 7)
    with AnswerLog(path, SETTINGS) as log:
        log.add(answer("add/0"))
        log.add(answer("add/1", right=False))
        log.add(score)
    log = reopened(path)
    assert log.answers == {"add/0": answer("add/0"), "add/1": answer("add/1", right=False)}
    assert log.scores == {"json.dumps": score}


def test_an_answer_is_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerLog(path, SETTINGS) as log:
        log.add(answer("add/0"))
        assert reopened(path).answers == log.answers


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_an_unfinished_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerLog(path, SETTINGS) as log:
        log.add(answer("add/0"))
        log.add(answer("add/1"))
    path.write_bytes(path.read_bytes()[:-cut])
    with AnswerLog(path, SETTINGS) as log:
        assert list(log.answers) == ["add/0"]
        log.add(answer("add/2"))
    assert list(reopened(path).answers) == ["add/0", "add/2"]


def test_a_run_killed_within_its_first_line_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b'{"type":"sett')
    with AnswerLog(path, SETTINGS) as log:
        log.add(answer("add/0"))
    assert list(reopened(path).answers) == ["add/0"]


def test_changed_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerLog(path, SETTINGS) as log:
        log.add(answer("add/0"))
    with pytest.raises(ConfigError, match=r"other settings \(seed 0, now 1\); name another directory with --out, or"):
        reopened(path, SETTINGS | {"seed": 1})


def test_settings_may_change_while_nothing_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    reopened(path)
    with AnswerLog(path, SETTINGS | {"seed": 1}) as log:
        log.add(answer("add/0"))
    assert list(reopened(path, SETTINGS | {"seed": 1}).answers) == ["add/0"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            '{"type":"score","document":"a","digest":"b","negative_log_likelihood":1.0,"tokens":2}\n',
            "no log of answers",
        ),
        ("once upon a time\n", "line 1"),
        ('{"type":"settings","settings":{"seed":0,"suite":"short"}}\n{"type":"answer"}\n', "line 2"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        reopened(path)

"""Whether a model is thinking, as its tokens show."""

import json
from pathlib import Path

import pytest

from engine.requests.thinking import ThinkingPhase, ThinkTokens, read_think_tokens
from launcher.shipped_model import shipped_model
from mesh.errors import CheckpointError

OPEN, CLOSE = 5, 6


def test_a_request_thinks_between_the_thinking_tokens() -> None:
    phase, tokens = ThinkingPhase(ThinkTokens(OPEN, CLOSE)), [9]
    found = [phase.after(tokens)]
    for more in ([OPEN], [9, 9], [9, CLOSE], [9], [OPEN, CLOSE, OPEN], []):
        tokens += more
        found.append(phase.after(tokens))
    assert found == [False, True, True, False, False, True, True]


def test_the_shipped_model_has_tokens_for_it() -> None:
    assert read_think_tokens(shipped_model()) == ThinkTokens(OPEN, CLOSE)


@pytest.mark.parametrize("content", [None, "{", json.dumps({"added_tokens": [{"id": 1, "content": "<think>"}]})])
def test_a_checkpoint_without_such_tokens_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="<think> and </think>"):
        read_think_tokens(tmp_path)

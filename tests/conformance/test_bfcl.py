"""The Berkeley function-calling leaderboard's simple and parallel questions, by its own handlers: `make check-bfcl`.

The shipped model knows other questions than these, so there is no score: every question must be answered, in chats
where the model may call tools, and as responses where it has to. Then what ended is calls of the tools that were
offered, with arguments that the suite reads. BFCL_ENTRIES=n asks the first n questions of each category alone.
"""

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("bfcl_eval", reason="installed by make check-bfcl")

from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
from bfcl_eval.model_handler.api_inference.openai_response import OpenAIResponsesHandler
from bfcl_eval.utils import load_dataset_entry

pytestmark = pytest.mark.check("bfcl")
CATEGORIES = ("simple_python", "simple_java", "simple_javascript", "parallel", "parallel_multiple")
# At a time.
QUESTIONS = 16


class Chats(OpenAICompletionsHandler):  # type: ignore[misc]
    """Answers are kept short: the shipped model writes on and on."""

    def generate_with_backoff(self, **asked: Any) -> Any:
        return super().generate_with_backoff(**asked, max_tokens=32, reasoning_effort="none")


class Responses(OpenAIResponsesHandler):  # type: ignore[misc]
    """The suite leaves calls to the model; ours calls nothing unless it has to."""

    def generate_with_backoff(self, **asked: Any) -> Any:
        return super().generate_with_backoff(**asked, max_output_tokens=128, tool_choice="required")

    def _parse_query_response_FC(self, response: Any) -> Any:
        """With whether the answer ended."""
        return {**super()._parse_query_response_FC(response), "reasoning_content": response.status}


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("handler", [Chats, Responses])
def test_every_question_is_answered(
    handler: type[Chats] | type[Responses],
    category: str,
    mesh_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{mesh_url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    asker = handler("tiny-r1", temperature=0.001, registry_name="tiny-r1-FC", is_fc_model=True)
    entries = load_dataset_entry(category)[: int(os.environ.get("BFCL_ENTRIES", "0")) or None]
    assert entries

    def ask(entry: dict[str, Any]) -> str:
        # Raises what the API answers in place of an answer.
        result, facts = asker.inference_single_turn_FC(entry, include_input_log=False)
        if handler is Chats:
            return "calls" if isinstance(result, list) else "text"
        if facts["reasoning_content"] != "completed":
            return "cut off"
        called = asker.decode_ast(result, "Python", has_tool_call_tag=False)
        # In names that it sends, the suite writes dots as underscores.
        offered = {function["name"].replace(".", "_") for function in entry["function"]}
        assert called and {name for call in called for name in call} <= offered
        return "calls"

    with ThreadPoolExecutor(QUESTIONS) as pool:
        outcomes = Counter(pool.map(ask, entries))
    sys.stdout.write(f"{handler.__name__}, {category}: {dict(outcomes)}\n")
    assert outcomes.total() == len(entries)

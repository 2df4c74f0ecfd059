"""LangChain's standard tests of chat models, with its client of OpenAI's API: `make check-langchain`.

The shipped model writes nonsense where it was not trained: what is tested is the API.
"""

import pytest

pytest.importorskip("langchain_tests", reason="part of the extra 'conformance'")

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

# Its client keeps connections, which belong to a loop.
pytestmark = [pytest.mark.check("langchain"), pytest.mark.asyncio(loop_scope="session")]
# The token of a quotation mark, which ends strings.
QUOTE = 8
# What a test asks of the model rather than of the API.
SKILLS = {
    "test_agent_loop": "call a tool of its own accord",
    "test_json_mode": "choose the right keys without a schema",
    "test_unicode_tool_call_integration": "write Chinese",
}


class TestChatOpenAI(ChatModelIntegrationTests):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def _served(self, mesh_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        if (skill := SKILLS.get(request.node.originalname)) is not None:
            request.applymarker(pytest.mark.xfail(reason=f"the shipped model would have to {skill}"))
        monkeypatch.setenv("OPENAI_API_BASE", f"{mesh_url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "unused")

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "model": "tiny-r1",
            # Texts and strings without end would be cut off.
            "temperature": 0.0,
            "frequency_penalty": 1.0,
            "logit_bias": {QUOTE: 8},
            "seed": 1,
            "max_tokens": 1024,
            "stream_usage": True,
            # It would call a tool again and again.
            "extra_body": {"chat_template_kwargs": {"thinking": False}, "parallel_tool_calls": False},
        }

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False

"""LangChain's standard tests of chat models, with its client of OpenAI's API: `make check-langchain`.

The shipped model writes nonsense where it was not trained: what is tested is the API.
"""

import pytest

pytest.importorskip("langchain_tests", reason="part of the extra 'conformance'")

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

# Its client keeps connections, which belong to a loop.
pytestmark = [pytest.mark.check("langchain"), pytest.mark.asyncio(loop_scope="session")]


class TestChatOpenAI(ChatModelIntegrationTests):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def _served(self, mesh_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_BASE", f"{mesh_url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "unused")

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {
            "model": "tiny-r1",
            "temperature": 0.0,
            "max_tokens": 1024,
            "stream_usage": True,
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

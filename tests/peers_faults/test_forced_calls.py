"""A call that must be made, by a model that thinks."""

import pytest

from tests.support.fake_decode import FakeDecodeWorker, scripted
from tests.support.gateways import running_mesh
from tests.support.openai_calls import CHAT, HELLO
from tests.support.oracle_texts import spelled

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
REST = '{"city": "Oslo"}<｜tool▁call▁end｜><｜end▁of▁sentence｜>'
CHOICES = {"required": "required", "named": NAMED}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", CHOICES)
async def test_a_forced_call_is_made_though_the_model_thinks(choice: str, stream: bool) -> None:
    """https://github.com/vllm-project/vllm/pull/46149: a forced call with thinking on was a 500, or broke off."""
    worker = FakeDecodeWorker(next_token=scripted(spelled(REST)), eos_token_id=1)
    body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": CHOICES[choice], "stream": stream}
    body |= {"chat_template_kwargs": {"thinking": True}, "model": "oracle"}
    async with running_mesh(worker) as mesh:
        answer = await mesh.http.post(CHAT, json=body)
        assert answer.status_code == 200
        assert '"name":"weather"' in answer.text and "error" not in answer.text
        (submission,) = worker.submissions
        assert submission.HasField("constraint")

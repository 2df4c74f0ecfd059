"""Log probabilities of prompts over both APIs, from a worker that says that token i has the probability exp(-i)."""

import json
import threading
from typing import Any

import pytest
from deepmesh.v1 import common_pb2

from gateway.prompts.tokenizer import Tokenizer
from mesh.errors import WorkerLost
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import Collected, collect, ids_request, running_mesh
from tests.support.oracle_texts import spelled

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "héllo"
BEGIN = "<｜begin▁of▁sentence｜>"
LONG = [7] * 4200


async def test_vllms_field_names_every_token_and_its_rank() -> None:
    async with running_mesh() as mesh:
        body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2, "prompt_logprobs": 2}
        (choice,) = (await mesh.http.post(COMPLETIONS, json=body)).json()["choices"]
        first, second, third = choice["prompt_logprobs"]
        tokenizer = mesh.gateway.catalog.text("oracle").tokenizer
        assert tokenizer is not None
        assert first is None
        assert {token: entry["logprob"] for token, entry in second.items()} == {"6": -6.0, "0": -0.0, "1": -1.0}
        assert [second["6"]["rank"], second["0"]["rank"], second["1"]["rank"]] == [7, 1, 2]
        assert third["7"]["logprob"] == -7
        assert third["7"]["decoded_token"] == tokenizer.token_text(7)
        assert choice["logprobs"] is None
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "prompt_logprobs": 0}
        answer = (await mesh.http.post(CHATS, json=chat)).json()
        sent = list(mesh.worker.submissions[-1].token_ids)
        assert [None, *(int(next(iter(each))) for each in answer["prompt_logprobs"][1:])] == [None, *sent[1:]]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_begins_with_the_prompts_logprobs(stream: bool) -> None:
    async with running_mesh() as mesh:
        body = {"prompt": TEXT, "max_tokens": 2, "echo": True, "logprobs": 1, "n": 2, "stream": stream}
        sent = await mesh.http.post(COMPLETIONS, json=body)
        choices = joined(sent.text) if stream else sent.json()["choices"]
        prompt = spelled(TEXT)
        for choice in choices:
            report = choice["logprobs"]
            assert report["token_logprobs"][: len(prompt) + 1] == [None, *(-float(each) for each in prompt)]
            assert report["top_logprobs"][0] is None
            assert len(report["top_logprobs"][1]) == 1
            assert (report["tokens"][0], report["text_offset"][:2]) == (BEGIN, [0, 0])
            assert len(report["tokens"]) == len(prompt) + 3
            assert choice["text"].startswith(TEXT)
        # The second answer's prompt is the first's.
        assert [each.sampling.HasField("prompt_logprobs") for each in mesh.worker.submissions] == [True, False]


def joined(events: str) -> list[dict[str, Any]]:
    """The choices of a stream, each put together."""
    found: dict[int, dict[str, Any]] = {}
    for line in events.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            whole = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
            whole["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


async def test_over_grpc_the_first_delta_has_them() -> None:
    async with running_mesh() as mesh:
        asked = ids_request(sampling=common_pb2.SamplingParams(prompt_logprobs=1))
        answer = await collect(mesh, asked)
        first, *others = answer.deltas
        assert [(each.token_id, each.logprob) for each in first.prompt_logprobs] == [(6, -6.0), (7, -7.0)]
        assert [token.token_id for token in first.prompt_logprobs[0].top] == [0]
        assert not any(each.prompt_logprobs for each in others)
        assert answer.started.stream_token == ""


async def test_they_come_once_even_if_the_worker_is_lost() -> None:
    workers = [FakeDecodeWorker(worker_id=f"decode-{index}", step_seconds=0.01) for index in range(2)]
    async with running_mesh(*workers) as mesh:
        asked = ids_request(max_tokens=40, sampling=common_pb2.SamplingParams(prompt_logprobs=0))
        found, broken = 0, False
        async for message in mesh.stub.Generate(asked, timeout=30):
            found += len(message.delta.prompt_logprobs)
            if message.delta.position and not broken:
                broken = True
                (used,) = (worker for worker in workers if worker.submissions)
                used.fail(WorkerLost("gone"))
        assert found == 2


async def test_no_stream_waits_for_a_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_mesh(FakeDecodeWorker(context_tokens=8192)) as mesh:
        spell, spelled_here = Tokenizer.token_text, list[bool]()

        def token_text(tokenizer: Tokenizer, token_id: int) -> str:
            if token_id == LONG[0]:
                spelled_here.append(threading.current_thread() is threading.main_thread())
            return spell(tokenizer, token_id)

        monkeypatch.setattr(Tokenizer, "token_text", token_text)
        body = {"prompt": LONG, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2, "stream": True}
        choices = joined((await mesh.http.post(COMPLETIONS, json=body)).text)
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == 2 * [len(LONG) + 1]
        asked = ids_request(LONG, max_tokens=1, sampling=common_pb2.SamplingParams(prompt_logprobs=0))
        assert len(scores_of(await collect(mesh, asked))) == len(LONG) - 1
        assert len(spelled_here) >= 3 * len(LONG) - 1
        assert not any(spelled_here)


async def test_a_long_prompts_come_in_small_messages() -> None:
    prompt = list(range(300, 500)) * 21
    async with running_mesh(FakeDecodeWorker(context_tokens=8192)) as mesh:
        asked = ids_request(prompt, max_tokens=2, sampling=common_pb2.SamplingParams(prompt_logprobs=20))
        answer = await collect(mesh, asked)
        scores = scores_of(answer)
        assert [(each.token_id, each.logprob) for each in scores] == [(token, -token) for token in prompt[1:]]
        assert {len(each.top) for each in scores} == {20}
        reports = [delta for delta in answer.deltas if delta.prompt_logprobs]
        assert max(delta.ByteSize() for delta in reports) < 1 << 20
        assert len(reports) > 21 * len(prompt) // 8192
        assert not any(delta.position for delta in reports)


def scores_of(answer: Collected) -> list[common_pb2.PositionLogprobs]:
    return [each for delta in answer.deltas for each in delta.prompt_logprobs]


@pytest.mark.parametrize("body", [{"prompt": [LONG, LONG, LONG]}, {"prompt": LONG, "n": 3}])
async def test_those_of_all_choices_together_are_bounded(body: dict[str, Any]) -> None:
    async with running_mesh(FakeDecodeWorker(context_tokens=8192)) as mesh:
        few = {**body, "max_tokens": 1, "prompt_logprobs": 1}
        assert (await mesh.http.post(COMPLETIONS, json=few)).status_code == 200
        refused = await mesh.http.post(COMPLETIONS, json={**few, "prompt_logprobs": 20})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
        await mesh.drained()


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "streamed": (COMPLETIONS, {"prompt": "hi", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    "too many": (COMPLETIONS, {"prompt": "hi", "prompt_logprobs": 21}, "prompt_logprobs"),
    "negative": (CHATS, {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": -1}, "prompt_logprobs"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_reported_is_refused_by_name(name: str) -> None:
    path, body, field = BAD[name]
    async with running_mesh() as mesh:
        answer = await mesh.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)

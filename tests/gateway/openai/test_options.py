"""What a request may ask for besides sampling: several choices and prompts, echoes, salts, reasoning, usage."""

import hmac
from typing import Any, cast

import pytest

from gateway.config import ApiKeyConfig
from gateway.openai.endpoint import STREAM_HEADER
from mesh.errors import Overloaded, WorkerFull
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import prefill_identity, running_mesh
from tests.support.openai_calls import CHAT, COMPLETIONS, HELLO, client
from tests.support.oracle_texts import answering, spelled


async def test_choices_draw_for_themselves_and_share_a_placement() -> None:
    async with running_mesh(answering("so<｜end▁of▁sentence｜>")) as mesh:
        answer = await client(mesh).chat.completions.create(model="oracle", messages=HELLO, n=3, seed=5)
        assert [(each.index, each.message.content) for each in answer.choices] == [(0, "so"), (1, "so"), (2, "so")]
        submissions = mesh.worker.submissions
        assert sorted(each.sampling.seed for each in submissions) == [5, 6, 7]
        assert len({each.request_id for each in submissions}) == 3
        assert len(mesh.scheduler.queries) == 1
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(submissions[0].token_ids)
        assert answer.usage.completion_tokens == 3 * len(spelled("so<｜end▁of▁sentence｜>"))


@pytest.mark.parametrize("pushed", [False, True])
async def test_siblings_wait_until_the_prompts_kv_is_where_they_go(pushed: bool) -> None:
    class Watched(FakeDecodeWorker):
        def _submit(self, submission: Any) -> None:
            generated.append(max((request.generated for request in self.requests.values()), default=0))
            super()._submit(submission)

    generated: list[int] = []
    async with running_mesh(Watched(step_seconds=0.01)) as mesh:
        if pushed:
            mesh.scheduler.add(prefill_identity())
        await mesh.http.post(COMPLETIONS, json={"prompt": "hi", "n": 2, "max_tokens": 20})
        assert generated[1] >= (2 if pushed else 1)
        assert mesh.worker.submissions[1].HasField("prefill") == pushed


async def test_a_sibling_that_finds_no_room_is_placed_anew() -> None:
    class Full(FakeDecodeWorker):
        def _submit(self, submission: Any) -> None:
            if len(self.submissions) == 1:
                self.refusals = [WorkerFull("full")]
            super()._submit(submission)

    async with running_mesh(Full(), FakeDecodeWorker(worker_id="decode-1")) as mesh:
        answer = await mesh.http.post(COMPLETIONS, json={"prompt": "hi", "n": 2, "max_tokens": 20})
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length", "length"]
        assert len(mesh.workers[1].submissions) == 1


@pytest.mark.parametrize(
    ("asked", "resumable"),
    [({}, True), ({"n": 2}, False), ({"prompt": ["hi", "you"]}, False), ({"stream": False}, False)],
)
async def test_workers_keep_only_what_a_client_can_go_on_with(asked: dict[str, Any], resumable: bool) -> None:
    async with running_mesh() as mesh:
        body = {"prompt": "hi", "max_tokens": 3, "stream": True, **asked}
        response = await mesh.http.post(COMPLETIONS, json=body)
        assert (STREAM_HEADER in response.headers) == resumable
        assert {each.HasField("stream") for each in mesh.worker.submissions} == {resumable}


async def test_choices_stream_side_by_side() -> None:
    async with running_mesh(answering("héllo🤖", step_seconds=0.002)) as mesh:
        stream = await client(mesh).chat.completions.create(
            model="oracle",
            messages=HELLO,
            n=3,
            max_tokens=len(spelled("héllo🤖")),
            stream=True,
            stream_options=cast(Any, {"include_usage": True, "continuous_usage_stats": True}),
        )
        chunks = [chunk async for chunk in stream]
        texts = ["", "", ""]
        for chunk in chunks[:-1]:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == ["héllo🤖"] * 3
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        assert counts[-1] == 3 * len(spelled("héllo🤖"))


async def test_an_error_of_one_choice_ends_them_all() -> None:
    class FailsSecond(FakeDecodeWorker):
        def generate(self, request: Any) -> None:
            if len(self.submissions) == 3 and request.submission is self.submissions[1]:
                request.failure = Overloaded("out of blocks")
            else:
                super().generate(request)

    async with running_mesh(FailsSecond(step_seconds=0.005)) as mesh:
        for stream in (False, True):
            body = {"messages": HELLO, "n": 3, "max_tokens": 3000, "stream": stream}
            answer = await mesh.http.post(CHAT, json=body)
            assert answer.text.count("out of blocks") == 1
            await mesh.drained()
            mesh.worker.submissions.clear()


async def test_several_prompts_are_answered_in_their_order() -> None:
    async with running_mesh() as mesh:
        for prompts in (["a", "bc"], [spelled("a"), spelled("bc")]):
            answer = await client(mesh).completions.create(
                model="oracle", prompt=cast(Any, prompts), n=2, max_tokens=3, echo=True
            )
            texts = [choice.text for choice in answer.choices]
            assert [text[:2] == "bc" for text in texts] == [False, False, True, True]
            assert texts[0][0] == texts[1][0] == "a"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 3 + (2 if isinstance(prompts[0], str) else 0)
            assert answer.usage.completion_tokens == 12


async def test_the_likeliest_of_several_answers_are_given() -> None:
    class Unsure(FakeDecodeWorker):
        """The answer with seed 6 is the likeliest, then the one with seed 7."""

        def _output(self, stream_id: int, request: Any) -> Any:
            output = super()._output(stream_id, request)
            for entry in () if output is None else output.logprobs:
                entry.logprob = -1.0 - abs(6.2 - request.submission.sampling.seed)
            return output

        def generate(self, request: Any) -> None:
            self.next_token = lambda index, tokens: spelled(str(request.submission.sampling.seed))[0]
            super().generate(request)

    async with running_mesh(Unsure()) as mesh:
        body = {"prompt": "hi", "max_tokens": 2, "seed": 5, "n": 2, "best_of": 4}
        for wanted, shown in ((None, False), (0, True)):
            answer = (await mesh.http.post(COMPLETIONS, json={**body, "logprobs": wanted})).json()
            assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "66"), (1, "77")]
            assert all((each["logprobs"] is not None) == shown for each in answer["choices"])
            assert answer["usage"]["completion_tokens"] == 8
        for wrong in ({"best_of": 1}, {"stream": True}):
            refused = await mesh.http.post(COMPLETIONS, json={**body, **wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


async def test_a_prompt_is_echoed_before_its_answer_whole_and_streamed() -> None:
    async with running_mesh(answering("there")) as mesh:
        for stream in (False, True):
            body = {"prompt": "hi ", "max_tokens": 5, "echo": True, "stream": stream, "stop": "hi"}
            answer = await mesh.http.post(COMPLETIONS, json=body)
            assert answer.text.count('"text":"hi ') == 1
        whole = await client(mesh).completions.create(model="oracle", prompt="hi ", max_tokens=5, echo=True)
        assert whole.choices[0].text == "hi there"


async def test_the_stop_string_may_stay_in_the_text() -> None:
    async with running_mesh(answering("one STOP two", step_seconds=0.005)) as mesh:
        answer = await client(mesh).chat.completions.create(
            model="oracle", messages=HELLO, stop=["STOP"], extra_body={"include_stop_str_in_output": True}
        )
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one STOP", "stop")


async def test_a_long_prompt_may_be_cut_from_its_front() -> None:
    async with running_mesh(FakeDecodeWorker(context_tokens=50)) as mesh:
        long = {"prompt": "x" * 100 + "end", "max_tokens": 8}
        assert (await mesh.http.post(COMPLETIONS, json=long)).status_code == 400
        for keep, kept in ((3, 3), (-1, 42)):
            answer = await mesh.http.post(COMPLETIONS, json={**long, "truncate_prompt_tokens": keep, "echo": True})
            assert answer.status_code == 200
            submitted = list(mesh.worker.submissions[-1].token_ids)
            assert (len(submitted), submitted[-3:]) == (kept, spelled("end"))
            assert answer.json()["choices"][0]["text"].startswith("x" * (kept - 3) + "end")


async def test_a_cache_salt_never_replaces_the_tenants() -> None:
    keys = tuple(ApiKeyConfig.model_validate({"name": name, "key": f"{name}-secret"}) for name in ("alice", "carol"))
    async with running_mesh(api_keys=keys) as mesh:
        roots = {}
        for name in ("alice", "carol"):
            for salt in (None, "alice", "s"):
                headers = {"authorization": f"Bearer {name}-secret"}
                body = {"messages": HELLO, "max_tokens": 1, "cache_salt": salt}
                assert (await mesh.http.post(CHAT, json=body, headers=headers)).status_code == 200
                roots[name, salt] = mesh.worker.submissions[-1].cache_salt
        assert len(set(roots.values())) == 6
        assert roots["alice", "s"] == hmac.digest(roots["alice", None], b"s", "sha256")


@pytest.mark.parametrize(
    ("fields", "opened"),
    [
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
    ],
)
async def test_reasoning_is_switched_by_either_name(fields: dict[str, Any], opened: bool) -> None:
    async with running_mesh() as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **fields})
        assert answer.status_code == 200
        think = spelled("<think>")[0]
        assert (think in mesh.worker.submissions[0].token_ids) == opened

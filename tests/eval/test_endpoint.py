import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eval.endpoint import Completion, Endpoint, Sampling
from eval.suite import questions
from mesh.errors import EndpointUnavailable, InvalidRequest, UnknownModel
from tests.support.answering_server import AnsweringServer, serving

GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=7)


@asynccontextmanager
async def endpoint_over(app: Starlette, **values: Any) -> AsyncIterator[Endpoint]:
    async with serving(app) as url:
        timeout_s = values.get("timeout_s", 10.0)
        async with Endpoint(url, values.get("model"), values.get("api_key"), timeout_s) as endpoint:
            yield endpoint


def answering_with(content: Any, status: int = 200) -> Starlette:
    async def answer(request: Request) -> Response:
        return JSONResponse(content, status)

    return Starlette(routes=[Route("/v1/{path:path}", answer, methods=["GET", "POST"])])


async def test_the_first_model_listed_is_asked_unless_one_is_named() -> None:
    server = AnsweringServer(questions("short", seed=0, problems=1))
    async with endpoint_over(server.app) as endpoint:
        assert await endpoint.choose_model() == "pupil"
    async with endpoint_over(server.app, model="other") as endpoint:
        assert await endpoint.choose_model() == "other"


async def test_an_unknown_model_is_named_with_the_known() -> None:
    async with endpoint_over(AnsweringServer([]).app, model="absent") as endpoint:
        with pytest.raises(UnknownModel, match="'absent'; it serves: pupil, other"):
            await endpoint.choose_model()


async def test_a_question_is_one_user_message_with_sampling() -> None:
    (question,) = questions("short", seed=0, problems=1)[:1]
    server = AnsweringServer([question])
    async with endpoint_over(server.app) as endpoint:
        await endpoint.choose_model()
        completion = await endpoint.chat(question.problem.prompt, 99, Sampling(0.6, 0.95, 7))
    assert server.bodies == [
        {
            "model": "pupil",
            "messages": [{"role": "user", "content": question.problem.prompt}],
            "max_tokens": 99,
            "temperature": 0.6,
            "top_p": 0.95,
            "seed": 7,
        }
    ]
    problem = question.problem
    expected = Completion(problem.reply, problem.reasoning, False, len(problem.prompt), len(problem.reply))
    assert completion == expected


async def test_overload_is_waited_out() -> None:
    (question,) = questions("short", seed=0, problems=1)[:1]
    server = AnsweringServer([question])
    server.busy = 2
    async with endpoint_over(server.app) as endpoint:
        assert (await endpoint.chat(question.problem.prompt, 9, GREEDY)).content == question.problem.reply
    assert server.busy == 0


async def test_an_endpoint_that_stays_full_is_given_up() -> None:
    server = AnsweringServer([])
    server.busy = 1000
    async with endpoint_over(server.app, timeout_s=1.0) as endpoint:
        with pytest.raises(EndpointUnavailable, match=r"given up after 1 s: .*answered 503: full"):
            await endpoint.chat("1+1?", 9, GREEDY)
    assert server.busy < 1000 - 1, "tried again before it gave up"


async def test_a_refused_request_is_told_from_a_failing_endpoint() -> None:
    async with endpoint_over(answering_with({"error": {"message": "too long"}}, 400)) as endpoint:
        with pytest.raises(InvalidRequest, match="answered 400: too long"):
            await endpoint.chat("1+1?", 9, GREEDY)
    async with endpoint_over(answering_with({"error": {"message": "who are you"}}, 401)) as endpoint:
        with pytest.raises(EndpointUnavailable, match="answered 401: who are you"):
            await endpoint.chat("1+1?", 9, GREEDY)


@pytest.mark.parametrize("content", [{"hello": 1}, {"choices": []}, {"choices": [{"message": 3}]}, [1]])
async def test_something_else_than_an_openai_api_is_told_so(content: Any) -> None:
    async with endpoint_over(answering_with(content)) as endpoint:
        with pytest.raises(EndpointUnavailable, match=r"does not answer as an OpenAI API does|without a choice"):
            await endpoint.chat("1+1?", 9, GREEDY)


async def test_nobody_at_the_url_is_told_at_once() -> None:
    async with Endpoint("http://127.0.0.1:9/v1", None, None, timeout_s=5) as endpoint:
        with pytest.raises(EndpointUnavailable, match=r"127.0.0.1:9/v1/models does not answer: ConnectError"):
            await endpoint.choose_model()


async def test_reasoning_is_read_under_either_of_its_names() -> None:
    message = {"content": None, "reasoning": "so I think"}
    async with endpoint_over(answering_with({"choices": [{"message": message}]})) as endpoint:
        completion = await endpoint.chat("1+1?", 9, GREEDY)
    assert (completion.content, completion.reasoning) == ("", "so I think")


async def test_the_key_travels_as_a_bearer_token() -> None:
    seen: list[str | None] = []

    async def models(request: Request) -> Response:
        seen.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "m"}]})

    async with endpoint_over(Starlette(routes=[Route("/v1/models", models)]), api_key="secret") as endpoint:
        await endpoint.choose_model()
    assert seen == ["Bearer secret"]


async def test_an_echoed_text_is_scored_without_its_ends() -> None:
    server = AnsweringServer([])
    server.echoes = True
    async with endpoint_over(server.app) as endpoint:
        assert await endpoint.text_logprobs("abcd") == pytest.approx([-math.log(4)] * 3)


@pytest.mark.parametrize(
    "choice",
    [
        # `echo` was ignored.
        {"text": "!", "logprobs": {"token_logprobs": [-0.5]}},
        # `logprobs` was.
        {"text": "abcd!", "logprobs": None},
    ],
)
async def test_a_server_that_ignores_fields_is_not_believed(choice: dict[str, Any]) -> None:
    async with endpoint_over(answering_with({"choices": [choice], "usage": {"completion_tokens": 1}})) as endpoint:
        assert await endpoint.text_logprobs("abcd") is None


async def test_a_server_that_refuses_to_echo_offers_no_likelihoods() -> None:
    async with endpoint_over(AnsweringServer([]).app) as endpoint:
        assert await endpoint.text_logprobs("abcd") is None

"""An OpenAI endpoint that knows the answers to some questions."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eval.suite import Question


class AnsweringServer:
    """Answers `questions` rightly, except those whose ids are in `wrong`. Tests set the attributes below."""

    def __init__(self, questions: Sequence[Question], wrong: Collection[str] = ()) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.model = "pupil"
        self.in_flight = self.most_in_flight = 0
        # How many more chat requests are answered before all others get status 500; None answers all.
        self.left: int | None = None
        # How many chat requests get status 503 first.
        self.busy = 0
        # Ids of questions that get status 400, and of questions whose answers are cut off.
        self.refused: Collection[str] = ()
        self.cut_off: Collection[str] = ()
        # Whether completions echo their prompt. Each character is then a token of probability 1/4.
        self.echoes = False
        self._questions = {question.problem.prompt: question for question in questions}
        self._wrong = wrong
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    @property
    def asked(self) -> list[str]:
        """Ids of the questions asked so far, in the order of arrival."""
        return [self._questions[body["messages"][0]["content"]].id for body in self.bodies if "messages" in body]

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model}, {"id": "other"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if self.busy:
            self.busy -= 1
            return JSONResponse({"error": {"message": "full"}}, 503, {"retry-after": "0"})
        if self.left is not None and self.left <= 0:
            return JSONResponse({"error": {"message": "out of order"}}, 500)
        if self.left is not None:
            self.left -= 1
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.002)
        self.in_flight -= 1
        return self._answer(self._questions[body["messages"][0]["content"]])

    def _answer(self, question: Question) -> Response:
        if question.id in self.refused:
            return JSONResponse({"error": {"message": "the prompt is too long"}}, 400)
        text = "no idea" if question.id in self._wrong else question.problem.reply
        message = {"role": "assistant", "content": text, "reasoning_content": question.problem.reasoning}
        reason = "length" if question.id in self.cut_off else "stop"
        usage = {"prompt_tokens": len(question.problem.prompt), "completion_tokens": len(text)}
        return JSONResponse({"choices": [{"message": message, "finish_reason": reason}], "usage": usage})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if not self.echoes:
            return JSONResponse({"error": {"message": "echo is not supported"}}, 400)
        logprobs = [None, *[-math.log(4)] * (len(body["prompt"]) - 1), -9.0]
        choice = {"text": body["prompt"] + "!", "logprobs": {"token_logprobs": logprobs}}
        return JSONResponse({"choices": [choice], "usage": {"completion_tokens": 1}})


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    """Serve `app` on a free port; gives the base URL of its API."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    # Connections wait in the listener's queue until the server accepts.
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await task

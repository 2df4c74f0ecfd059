import asyncio
import errno
import io
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import uvicorn
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from cli.commands import build
from loadgen import run as load
from loadgen.options import LoadOptions
from loadgen.report import Report, table
from mesh.errors import ConfigError, EndpointUnavailable, UnknownModel
from tests.support.programs import ROOT
from tests.support.waiting import eventually

TOKEN_SECONDS = 0.002


class TinyGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers with max_tokens tokens at a set pace; refuses prompts of one token."""

    def __init__(self) -> None:
        self.requests: list[gateway_pb2.GenerateRequest] = []

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=[gateway_pb2.Model(name="tiny", vocabulary_size=64)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        self.requests.append(request)
        prompt_tokens = len(request.prompt.token_ids.ids)
        if prompt_tokens == 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too short")
        started = gateway_pb2.GenerateStarted(model="tiny", prompt_tokens=prompt_tokens)
        yield gateway_pb2.GenerateResponse(started=started)
        for _ in range(request.max_tokens):
            await asyncio.sleep(TOKEN_SECONDS)
            yield gateway_pb2.GenerateResponse(delta=gateway_pb2.GenerateDelta(text="a", token_count=1))
        cached = {"cached_tokens": 3, "host_cached_tokens": 2, "store_cached_tokens": 1}
        usage = common_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=request.max_tokens, **cached)
        yield gateway_pb2.GenerateResponse(finished=gateway_pb2.GenerateFinished(usage=usage))


class TinyOpenAI:
    """The same over HTTP: max_tokens messages of one token each. `cut_after` ends streams early."""

    def __init__(self, cut_after: int | None = None) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self._cut_after = cut_after
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/{call:path}", self._generate, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append((request.path_params["call"], body))
        if body["max_tokens"] == 13:
            return JSONResponse({"error": {"message": "unlucky"}}, status_code=429)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        chunks = [{"choices": [{"text": "a", "delta": {"content": "a"}}]} for _ in range(body["max_tokens"])]
        for chunk in chunks[: self._cut_after]:
            await asyncio.sleep(TOKEN_SECONDS)
            yield f"data: {json.dumps(chunk)}\n\n"
        if self._cut_after is None:
            usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"


@asynccontextmanager
async def serving_grpc(servicer: TinyGateway) -> AsyncIterator[str]:
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def serving_http(endpoint: TinyOpenAI) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="error", lifespan="off"))
    # Connections wait in the listener's queue until the server accepts.
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await task


def options(**values: object) -> LoadOptions:
    return LoadOptions.model_validate({"rate": 500.0, "requests": 20, "isl": 12, "osl": 5, "warmup": 0} | values)


async def run_grpc(servicer: TinyGateway, **values: object) -> Report:
    async with serving_grpc(servicer) as endpoint:
        return await load.load(options(grpc=endpoint, **values))


async def run_http(endpoint: TinyOpenAI, **values: object) -> Report:
    async with serving_http(endpoint) as url:
        return await load.load(options(url=url, **values))


async def test_a_gateway_is_measured_over_grpc() -> None:
    gateway = TinyGateway()
    report = await run_grpc(gateway)
    summary = report.summary
    assert (summary.completed, summary.errors) == (20, {})
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (240, 100, 60)
    assert (summary.host_cached_tokens, summary.store_cached_tokens) == (40, 20)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.max > 0
    # The last of five tokens comes four pauses after the first; a busy machine may only bring the first one late.
    assert all(record.message_times_s[-1] - record.scheduled_s >= 4 * TOKEN_SECONDS for record in report.records)
    assert summary.itl_ms is not None
    assert {len(request.prompt.token_ids.ids) for request in gateway.requests} == {12}
    assert all(request.ignore_eos and max(request.prompt.token_ids.ids) < 64 for request in gateway.requests)


async def test_an_openai_endpoint_is_measured_over_http() -> None:
    endpoint = TinyOpenAI()
    report = await run_http(endpoint)
    summary = report.summary
    assert (summary.completed, summary.errors) == (20, {})
    assert (summary.input_tokens, summary.output_tokens) == (180, 100)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.max > 0
    # The last of five tokens comes four pauses after the first; a busy machine may only bring the first one late.
    assert all(record.message_times_s[-1] - record.scheduled_s >= 4 * TOKEN_SECONDS for record in report.records)
    call, body = endpoint.bodies[0]
    assert (call, body["model"], body["ignore_eos"], len(body["prompt"])) == ("completions", "tiny", True, 12)


async def test_messages_of_a_dataset_go_to_chat(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}\n')
    endpoint = TinyOpenAI()
    await run_http(endpoint, dataset=path, requests=None)
    ((call, body),) = endpoint.bodies
    assert (call, body["max_tokens"]) == ("chat/completions", 3)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert "ignore_eos" not in body


async def test_synthetic_prompts_can_be_sent_as_chat() -> None:
    endpoint = TinyOpenAI()
    await run_http(endpoint, api="chat", requests=1)
    call, body = endpoint.bodies[0]
    assert call == "chat/completions"
    assert len(body["messages"][0]["content"].split()) == 12


async def test_arrivals_do_not_wait_for_answers() -> None:
    class AnswersWhenAllHaveCome(TinyGateway):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateResponse]:
            async for response in super().Generate(request, context):
                await eventually(lambda: len(self.requests) == 30)
                yield response

    summary = (await run_grpc(AnswersWhenAllHaveCome(), rate=float("inf"), requests=30)).summary
    assert (summary.completed, summary.held_back) == (30, 0)


async def test_waiting_for_concurrency_counts_in_the_first_token() -> None:
    report = await run_grpc(TinyGateway(), rate=float("inf"), requests=3, osl=20, max_concurrency=1)
    assert report.summary.held_back == 2
    assert report.records[2].ttft_s is not None
    assert report.records[2].ttft_s > 2 * 20 * TOKEN_SECONDS


async def test_refusals_over_grpc_are_counted_by_reason() -> None:
    summary = (await run_grpc(TinyGateway(), isl=1)).summary
    assert (summary.completed, summary.errors) == (0, {"INVALID_ARGUMENT": 20})


async def test_refusals_over_http_are_counted_by_status() -> None:
    report = await run_http(TinyOpenAI(), osl=13)
    assert report.summary.errors == {"http_429": 20}
    assert "unlucky" in (report.records[0].error_message or "")
    printed = io.StringIO()
    Console(file=printed, width=120).print(table(report))
    assert "unlucky" in printed.getvalue()


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    assert (await run_http(TinyOpenAI(cut_after=2))).summary.errors == {"answer_incomplete": 20}


async def test_an_answer_that_takes_too_long_is_a_timeout() -> None:
    summary = (await run_http(TinyOpenAI(), osl=2000, requests=2, timeout_s=0.1)).summary
    assert summary.errors == {"timeout": 2}


async def test_warmup_requests_are_not_counted() -> None:
    gateway = TinyGateway()
    report = await run_grpc(gateway, warmup=3)
    assert (len(gateway.requests), len(report.records)) == (23, 20)
    prompts = [tuple(request.prompt.token_ids.ids) for request in gateway.requests]
    assert len(set(prompts)) == 23


async def test_an_endpoint_that_does_not_answer_is_named() -> None:
    with pytest.raises(EndpointUnavailable, match=r"127[.]0[.]0[.]1:9"):
        await load.load(options(url="http://127.0.0.1:9/v1"))


async def test_an_unknown_model_is_named_with_the_known() -> None:
    with pytest.raises(UnknownModel, match="'other'; it serves: tiny"):
        await run_grpc(TinyGateway(), model="other")


async def test_a_run_leaves_table_plot_and_json(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one.json"
    printed = io.StringIO()
    async with serving_http(TinyOpenAI()) as url:
        chosen = options(url=url, output=path, ttft_slo_ms=10_000, api_key="secret")
        await asyncio.to_thread(load.main, chosen, Console(file=printed, width=120))
    written = msgspec.json.decode(path.read_bytes())
    assert len(written["records"]) == 20
    assert written["summary"]["goodput"]["share"] == 1.0
    assert written["options"]["osl"] == 5
    assert "secret" not in path.read_text()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "goodput" in printed.getvalue()


def test_an_unwritable_report_is_refused_before_sending(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*/file/report.json: "):
        load.main(options(url="http://127.0.0.1:9/v1", output=tmp_path / "file" / "report.json"))


@pytest.mark.parametrize(("name", "taken"), [("one.json", "one.json"), ("one.json", "one.png"), ("one.png", "other")])
def test_a_reports_taken_place_is_refused_before_sending(tmp_path: Path, name: str, taken: str) -> None:
    (tmp_path / taken).mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*one"):
        load.main(options(url="http://127.0.0.1:9/v1", output=tmp_path / name))


async def test_a_report_that_cannot_be_saved_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("loadgen.report.save", fill_the_disk)
    printed = io.StringIO()
    async with serving_http(TinyOpenAI()) as url:
        chosen = options(url=url, output=tmp_path / "one.json")
        with pytest.raises(OSError, match="No space"):
            await asyncio.to_thread(load.main, chosen, Console(file=printed, width=120))
    assert "20 of 20" in printed.getvalue()


async def test_a_stopped_run_keeps_what_was_measured() -> None:
    async with serving_grpc(TinyGateway()) as endpoint:
        chosen = options(grpc=endpoint, rate=50.0, requests=1000)
        answered = asyncio.Event()

        def show(sent: int, ended: int, total: int) -> None:
            assert total == 1000
            if ended >= 3:
                answered.set()

        run = asyncio.create_task(load.load(chosen, show, keep_when_cancelled=True))
        await answered.wait()
        run.cancel()
        report = await run
    assert report.interrupted
    assert 3 <= report.summary.completed <= report.summary.requests < 1000
    assert set(report.summary.errors) <= {"interrupted"}
    printed = io.StringIO()
    Console(file=printed, width=200).print(table(report))
    assert "stopped early" in printed.getvalue()


async def test_a_run_that_is_cancelled_by_its_caller_ends() -> None:
    async with serving_grpc(TinyGateway()) as endpoint:
        run = asyncio.create_task(load.load(options(grpc=endpoint, rate=50.0, requests=1000)))
        await asyncio.sleep(0.2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_ctrl_c_leaves_a_report(tmp_path: Path) -> None:
    path, program = tmp_path / "report.json", "import sys; from cli.main import main; sys.argv[0] = 'deepmesh'; main()"
    gateway = TinyGateway()
    async with serving_grpc(gateway) as endpoint:
        arguments = ("bench", "--endpoint", endpoint, "--rate", "50", "--requests", "10000", "--output", str(path))
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", program, *arguments, "--isl", "8", "--osl", "2"],
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        await eventually(lambda: len(gateway.requests) > 10)
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert "stopped early" in out.decode()
    assert json.loads(path.read_text())["interrupted"] is True


@pytest.mark.parametrize(("tokens", "status"), [(1, 1), (8, 0)])
async def test_the_status_tells_whether_any_request_was_answered(tmp_path: Path, tokens: int, status: int) -> None:
    async with serving_grpc(TinyGateway()) as endpoint:
        output = tmp_path / "report.json"
        options = ["--rate", "inf", "--requests", "3", "--osl", "2"]
        words = ["bench", *options, "--isl", str(tokens), "--endpoint", endpoint, "--output", str(output)]
        ended = await asyncio.to_thread(CliRunner().invoke, build(), words)
    completed = 0 if status else 3
    assert (ended.exit_code, f"{completed} of 3" in ended.output, output.exists()) == (status, True, True)


async def test_a_rate_that_takes_months_is_refused() -> None:
    gateway = TinyGateway()
    with pytest.raises(ConfigError, match="arrives after a month"):
        await run_grpc(gateway, rate=1e-300)
    assert not gateway.requests

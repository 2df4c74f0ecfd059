"""Connections that ask for nothing, or slowly, or that are too many."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from gateway.config import HttpConfig
from gateway.openai import connections, server
from gateway.openai.connections import MAX_HEAD_BYTES, MAX_PIPELINED, MAX_SMALL_CHUNKS, LimitedConnection
from mesh.observe.metrics import GATEWAY_HTTP_CLOSED
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import Mesh, direct, running_mesh
from tests.support.metric_values import value_of
from tests.support.waiting import PATIENCE_SECONDS, eventually

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
pytestmark = direct
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
COMPLETIONS = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def connect(mesh: Mesh, sent: bytes = b"") -> Pair:
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def closed(connection: Pair) -> bytes:
    """What the server sent before it closed the connection."""
    reader, writer = connection
    rest = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    return rest


async def answered(connection: Pair) -> bytes:
    reader, _ = connection
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(length)
    return head


async def test_a_connection_without_a_whole_request_is_closed() -> None:
    async with running_mesh(http=HttpConfig(header_seconds=0.2)) as mesh:
        silent, half = await connect(mesh), await connect(mesh, HEALTH[:-2])
        assert [await closed(silent), await closed(half)] == [b"", b""]


async def test_half_a_request_after_a_whole_one_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[LimitedConnection] = []

    class Noted(LimitedConnection):
        def _await_headers(self) -> None:
            waits.append(self)
            super()._await_headers()

    monkeypatch.setattr(connections, "LimitedConnection", Noted)
    async with running_mesh() as mesh:
        connection = await connect(mesh, HEALTH)
        for number in (1, 2):
            await answered(connection)
            # From the start of the connection, then from a request's first byte; not while it is idle.
            assert len(waits) == number and waits[0]._header_timer is None
            connection[1].write(HEALTH)
        await answered(connection)
        waits[0]._limits = replace(waits[0]._limits, header_seconds=0.01)
        connection[1].write(HEALTH[:-2])
        assert await closed(connection) == b""


async def test_an_idle_connection_is_closed() -> None:
    async with running_mesh(http=HttpConfig(keep_alive_seconds=1)) as mesh:
        connection = await connect(mesh, HEALTH)
        await answered(connection)
        assert await closed(connection) == b""


@pytest.mark.parametrize("part", [b"x: a\r\n", b"a"], ids=["many", "long"])
async def test_headers_without_end_are_refused_before_they_fill_the_memory(part: bytes) -> None:
    async with running_mesh() as mesh:
        reader, writer = await connect(mesh, HEALTH[:-2] + b"y: ")
        sent = 0
        # What is on its way when the server closes the connection may take the answer with it.
        with suppress(ConnectionError):
            while not reader.at_eof() and not writer.is_closing() and sent < 64 * MAX_HEAD_BYTES:
                writer.write(part * (MAX_HEAD_BYTES // len(part)))
                sent += MAX_HEAD_BYTES
                await writer.drain()
                # The server, on the same loop, reads what has arrived. The system's own buffers may hold all of it.
                await asyncio.sleep(0)
            assert (await closed((reader, writer))).startswith(b"HTTP/1.1 431 ")
        assert sent < 64 * MAX_HEAD_BYTES
        assert (await mesh.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "padding", [b"x: " + b"a" * 70_000, b"x: aaaaaaaa\r\n" * 7_000 + b"y: b"], ids=["long", "many"]
)
async def test_headers_that_come_in_one_piece_are_bounded_too(padding: bytes) -> None:
    async with running_mesh() as mesh:
        refused = await closed(await connect(mesh, HEALTH[:-2] + padding + b"\r\n\r\n"))
        assert refused.startswith(b"HTTP/1.1 431 ")
        assert (await mesh.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEALTH[:-2] + b"a b: c\r\n\r\n",
        COMPLETIONS + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
        COMPLETIONS + b"transfer-encoding: chopped\r\n\r\n",
        HEALTH[:-2] + b"host: b\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "header", "size of a chunk", "coding", "two hosts"],
)
async def test_a_request_that_is_no_http_names_its_client(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with running_mesh() as mesh:
        connection = await connect(mesh, sent)
        host, port = connection[1].get_extra_info("sockname")
        assert (await closed(connection)).startswith(b"HTTP/1.1 400 ")
        # Before the pause is over, the next one leaves no line.
        await closed(await connect(mesh, sent))
        (line,) = (vars(record)["fields"] for record in caplog.records if record.levelname == "WARNING")
        assert line == {"why": "malformed", "client": f"{host}:{port}", "connections": 1}


async def test_as_many_requests_may_be_sent_ahead_as_are_kept() -> None:
    async with running_mesh() as mesh:
        connection = await connect(mesh, HEALTH * (1 + MAX_PIPELINED))
        for _ in range(1 + MAX_PIPELINED):
            await answered(connection)


async def test_a_connection_that_sends_more_ahead_is_closed() -> None:
    async with running_mesh() as mesh:
        pipelined = GATEWAY_HTTP_CLOSED.labels("pipelined")
        before = value_of(pipelined)
        # Requests that were not read may take the answers with them.
        with suppress(ConnectionError):
            rest = await closed(await connect(mesh, HEALTH * 5_000))
            assert rest.count(b"HTTP/1.1 200 ") <= 1 + MAX_PIPELINED
        assert value_of(pipelined) == before + 1
        assert (await mesh.http.get("/health")).status_code == 200


async def test_a_malformed_request_does_not_break_the_answer_before_it() -> None:
    async with running_mesh() as mesh:
        sent = await closed(await connect(mesh, completion(b"1.1", stream=True) + b"no request\r\n\r\n"))
        assert b" 400 " not in sent


async def test_a_wish_for_a_tunnel_is_answered_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with running_mesh() as mesh:
        head = await answered(await connect(mesh, b"CONNECT / HTTP/1.1\r\nhost: localhost\r\n\r\n"))
        assert head.startswith(b"HTTP/1.1 4")
        assert not [record for record in caplog.records if record.levelname == "WARNING"]


def completion(version: bytes, **fields: Any) -> bytes:
    body = json.dumps({"model": "oracle", "prompt": "abc", "max_tokens": 3, **fields}).encode()
    head = b"POST /v1/completions HTTP/%s\r\nhost: ::1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (version, len(body)) + body


async def test_a_stream_over_http_1_0_ends_with_its_connection() -> None:
    async with running_mesh() as mesh:
        head, _, body = (await closed(await connect(mesh, completion(b"1.0", stream=True)))).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert body.startswith(b"id: 1\ndata: {") and body.endswith(b"data: [DONE]\n\n")


async def test_a_whole_answer_over_http_1_0_has_a_length() -> None:
    async with running_mesh() as mesh:
        head, _, body = (await closed(await connect(mesh, completion(b"1.0")))).partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head and json.loads(body)["choices"]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_only_stops_sending_is_answered(version: bytes, stream: bool) -> None:
    async with running_mesh() as mesh:
        connection = await connect(mesh, completion(version, stream=stream))
        connection[1].write_eof()
        *probe, answer = (await closed(connection)).split(b"HTTP/1.1 200 OK\r\n")
        assert probe == [b"HTTP/1.1 100 Continue\r\n\r\n" if version == b"1.1" else b""]
        assert (b"data: [DONE]" if stream else b'"finish_reason":"length"') in answer


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_nothing_is_computed_for_a_client_that_is_gone(version: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE_WITHOUT_PROBE_SECONDS", 0.01)
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        # Its answer would take 40 s.
        _, writer = await connect(mesh, completion(version, max_tokens=4_000, ignore_eos=True))
        await eventually(lambda: bool(mesh.worker.requests))
        writer.close()
        await mesh.drained()


async def test_trailers_without_end_close_their_connection() -> None:
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    async with running_mesh() as mesh:
        reader, writer = await connect(mesh, chunked)
        with suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"x: a\r\n" * (MAX_HEAD_BYTES // 6))
                await writer.drain()
            assert not await closed((reader, writer))
        assert writer.is_closing() or reader.at_eof()


async def test_large_headers_with_a_large_body_are_answered() -> None:
    body: Any = {"model": "oracle", "prompt": "a" * 300_000, "max_tokens": 1}
    async with running_mesh() as mesh:
        response = await mesh.http.post("/v1/completions", json=body, headers={"x-padding": "a" * 60_000})
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_idle_connections_give_way_to_new_ones() -> None:
    async with running_mesh(http=HttpConfig(connections=5)) as mesh:
        idle = [await connect(mesh) for _ in range(20)]
        assert (await mesh.http.get("/health")).status_code == 200
        for connection in idle[:15]:
            assert await closed(connection) == b""
        for _, writer in idle[15:]:
            writer.close()


async def test_connections_that_send_bodies_slowly_give_way_too() -> None:
    async with running_mesh(http=HttpConfig(connections=5)) as mesh:
        slow = []
        for _ in range(20):
            slow.append(await connect(mesh, COMPLETIONS + b"content-length: 100\r\nexpect: 100-continue\r\n\r\n{"))
            # Until the server waits for the rest.
            await asyncio.wait_for(slow[-1][0].readuntil(b" 100 Continue\r\n\r\n"), PATIENCE_SECONDS)
        assert (await mesh.http.get("/health")).status_code == 200
        for connection in slow[:15]:
            assert (await closed(connection)).startswith(b"HTTP/1.1 503 ")
        for _, writer in slow[15:]:
            writer.close()


async def test_the_largest_body_gives_way_if_bodies_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ARRIVING_BODIES", 2)
    async with running_mesh(http=HttpConfig(body_bytes=1024)) as mesh:
        begun = COMPLETIONS + b"content-length: 1024\r\n\r\n"
        small, large = await connect(mesh, begun + b" " * 100), await connect(mesh, begun + b" " * 1020)
        whole = await connect(mesh, begun + b" " * 1000)
        assert (await closed(large)).startswith(b"HTTP/1.1 503 ")
        for connection, rest in ((small, 924), (whole, 24)):
            connection[1].write(b" " * rest)
            assert (await answered(connection)).startswith(b"HTTP/1.1 400 ")


async def test_a_body_that_is_too_large_takes_no_others_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ARRIVING_BODIES", 2)
    async with running_mesh(http=HttpConfig(body_bytes=1024)) as mesh:
        begun = await connect(mesh, COMPLETIONS + b"content-length: 1024\r\n\r\n" + b" " * 1000)
        response = await mesh.http.post("/v1/completions", content=b" " * 5000)
        assert response.status_code == 413
        begun[1].write(b" " * 24)
        assert (await answered(begun)).startswith(b"HTTP/1.1 400 ")


CHUNKED = COMPLETIONS + b"transfer-encoding: chunked\r\n\r\n"


async def test_a_body_of_thousands_of_tiny_chunks_is_refused() -> None:
    async with running_mesh() as mesh:
        with suppress(ConnectionError):
            answer = await closed(await connect(mesh, CHUNKED + b"1\r\n \r\n" * 2 * MAX_SMALL_CHUNKS))
            assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"chunks"' in answer
        assert (await mesh.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("chunk", "count"),
    [(b"1\r\n \r\n", MAX_SMALL_CHUNKS - 1), (b"20\r\n" + b" " * 32 + b"\r\n", 2 * MAX_SMALL_CHUNKS)],
    ids=["few", "not tiny"],
)
async def test_a_body_may_come_in_small_chunks(chunk: bytes, count: int) -> None:
    async with running_mesh() as mesh:
        answer = await answered(await connect(mesh, CHUNKED + chunk * count + b"0\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" not in answer


async def test_half_a_body_is_refused_when_the_gateway_stops(caplog: pytest.LogCaptureFixture) -> None:
    async with running_mesh() as mesh:
        connection = await connect(mesh, COMPLETIONS + b"content-length: 100\r\nexpect: 100-continue\r\n\r\n{")
        await asyncio.wait_for(connection[0].readuntil(b" 100 Continue\r\n\r\n"), PATIENCE_SECONDS)
    assert b"the gateway stops" in await closed(connection)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_connection_beyond_the_limit_is_told_to_return() -> None:
    body: Any = {"model": "oracle", "prompt": "abc", "max_tokens": 2000, "stream": True}
    worker = FakeDecodeWorker(step_seconds=0.01)
    async with (
        running_mesh(worker, http=HttpConfig(connections=1)) as mesh,
        mesh.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        refused = await closed(await connect(mesh))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert await anext(response.aiter_lines())

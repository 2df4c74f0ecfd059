"""Broken streams: no token lost, repeated or retracted."""

import asyncio
from typing import Any

import grpc
import pytest
from deepmesh.v1 import common_pb2

from gateway.links import wire
from gateway.links.decode_link import DecodeLink
from mesh.errors import EngineFailed
from mesh.observe.metrics import GATEWAY_WORKER_LINKS
from tests.support.broken_streams import PROMPT, paced, start, under_way
from tests.support.fake_decode import FakeDecodeWorker, FakeRequest, oracle_tokens
from tests.support.gateways import collect, ids_request, running_mesh
from tests.support.metric_values import value_of
from tests.support.waiting import eventually


async def test_a_client_sees_nothing_of_a_broken_stream() -> None:
    async with running_mesh(paced()) as mesh:
        answer = start(mesh)
        for tokens in (5, 20, 35):
            await under_way(mesh.worker, tokens)
            mesh.worker.break_streams()
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert len(mesh.worker.submissions) == 1
        assert [len(hello.resume) for hello in mesh.worker.hellos] == [0, 1, 1, 1]
        assert len({hello.gateway_incarnation for hello in mesh.worker.hellos}) == 1


async def test_tokens_written_while_the_stream_was_broken_come_after_it() -> None:
    async with running_mesh(paced()) as mesh:
        answer = start(mesh, 60)
        await under_way(mesh.worker)
        mesh.worker.unreachable = True
        mesh.worker.break_streams()
        request = next(iter(mesh.worker.requests.values()))
        while request.live:
            mesh.worker.generate(request)
        mesh.worker.unreachable = False
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert len(mesh.worker.submissions) == 1


async def test_a_request_waits_for_a_broken_streams_successor() -> None:
    async with running_mesh(paced()) as mesh:
        first = start(mesh)
        await under_way(mesh.worker)
        mesh.worker.unreachable = True
        mesh.worker.break_streams()
        second = start(mesh)
        await eventually(lambda: len(mesh.scheduler.queries) == 2)
        mesh.worker.unreachable = False
        for answer in (first, second):
            assert (await answer).token_ids == oracle_tokens(PROMPT, 60)


async def test_a_request_cancelled_meanwhile_is_not_named_again() -> None:
    async with running_mesh(paced()) as mesh:
        kept, dropped = start(mesh), start(mesh)
        await eventually(lambda: len(mesh.worker.submissions) == 2)
        mesh.worker.unreachable = True
        mesh.worker.break_streams()
        dropped.cancel()
        await eventually(lambda: mesh.gateway.dispatcher.live_generations == 1)
        mesh.worker.unreachable = False
        assert (await kept).token_ids == oracle_tokens(PROMPT, 60)
        assert len(mesh.worker.hellos[-1].resume) == 1


async def test_the_gateway_finishes_answers_that_lost_their_end() -> None:
    class DiesWithTheLastToken(FakeDecodeWorker):
        def generate(self, request: FakeRequest) -> None:
            super().generate(request)
            if request.finished is not None:
                request.finished, request.failure = None, EngineFailed("died")

    async with running_mesh(DiesWithTheLastToken()) as mesh:
        answer = await start(mesh, 10)
        assert answer.token_ids == oracle_tokens(PROMPT, 10)
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert len(mesh.worker.submissions) == 1


async def test_all_requests_share_one_stream_to_a_worker() -> None:
    async with running_mesh(paced()) as mesh:
        answers = await asyncio.gather(*[start(mesh, 20) for _ in range(30)])
        assert all(answer.token_ids == oracle_tokens(PROMPT, 20) for answer in answers)
        assert len(mesh.worker.hellos) == 1
        await eventually(lambda: len(mesh.worker.acknowledged) == 30)


async def test_a_hundred_requests_survive_streams_that_break_all_the_time() -> None:
    async with running_mesh(paced(), paced(worker_id="decode-1")) as mesh:
        answers = [start(mesh, 100) for _ in range(100)]
        for step in range(10):
            await asyncio.sleep(0.05)
            mesh.workers[step % 2].break_streams()
        for answer in answers:
            assert (await answer).token_ids == oracle_tokens(PROMPT, 100)


async def test_a_worker_that_only_placement_knows_is_kept() -> None:
    known, new = paced(), paced(worker_id="decode-1")
    async with running_mesh(known) as mesh, new.started():
        mesh.scheduler.workers = {"decode-1": new.identity(), **mesh.scheduler.workers}
        answer = start(mesh)
        await under_way(new)
        mesh.gateway.links.retain({"decode-0": "first"})
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert (len(new.submissions), len(known.submissions)) == (1, 0)


async def test_a_request_that_cannot_be_encoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = wire.submission

    def encode_some(stream_id: int, attempt: int, placement: Any, generation: Any, now: float) -> Any:
        if generation.request.stop.max_tokens == 7:
            raise ValueError("Value out of range: -1")
        return encode(stream_id, attempt, placement, generation, now)

    monkeypatch.setattr(wire, "submission", encode_some)
    async with running_mesh(paced()) as mesh:
        undisturbed = start(mesh)
        await under_way(mesh.worker)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(mesh, ids_request(PROMPT, max_tokens=7))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        later = start(mesh)
        for answer in (undisturbed, later):
            assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert (len(mesh.worker.hellos), len(mesh.worker.submissions)) == (1, 2)


async def test_requests_outlive_a_links_failed_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, failures = DecodeLink._write_submission, [RuntimeError("a bug")]

    async def write_with_a_bug(link: DecodeLink, call: Any, stream_id: int) -> None:
        if link.live_streams > 1 and failures:
            raise failures.pop()
        await write(link, call, stream_id)

    monkeypatch.setattr(DecodeLink, "_write_submission", write_with_a_bug)
    async with running_mesh(paced()) as mesh:
        first = start(mesh)
        await under_way(mesh.worker)
        second = start(mesh)
        for answer in (first, second):
            assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert not failures
        assert len(mesh.worker.hellos) == 2


async def test_the_gauge_of_streams_follows_the_state_of_the_links() -> None:
    before = value_of(GATEWAY_WORKER_LINKS)
    async with running_mesh(paced()) as mesh:
        answer = start(mesh)
        await under_way(mesh.worker)
        assert value_of(GATEWAY_WORKER_LINKS) == before + 1
        mesh.worker.unreachable = True
        mesh.worker.break_streams()
        await eventually(lambda: value_of(GATEWAY_WORKER_LINKS) == before)
        mesh.worker.unreachable = False
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
    assert value_of(GATEWAY_WORKER_LINKS) == before

"""Lost workers, workers without room: requests go on elsewhere, no token lost, repeated or retracted."""

import time

import grpc
import pytest

from mesh.errors import (
    EngineFailed,
    GrammarSpent,
    InvalidRequest,
    MeshError,
    NoWorker,
    Overloaded,
    ShuttingDown,
    WorkerFull,
)
from mesh.rpc.failures import from_rpc_error
from tests.support.broken_streams import PROMPT, paced, start, under_way
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens
from tests.support.gateways import dispatch, limits, running_mesh
from tests.support.refusals import refused
from tests.support.waiting import eventually


async def test_requests_of_a_restarted_worker_continue() -> None:
    async with running_mesh(paced()) as mesh:
        answer = start(mesh)
        await under_way(mesh.worker)
        mesh.worker.restart("second")
        mesh.scheduler.add(mesh.worker.identity())
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        first, second = mesh.worker.submissions
        log = list(second.token_ids)
        assert log == PROMPT + oracle_tokens(PROMPT, len(log) - 3)
        assert len(log) > 3
        assert second.stop.max_tokens == 60 - (len(log) - 3)
        assert first.attempt < second.attempt
        assert first.sampling.seed == second.sampling.seed
        assert first.stream_id != second.stream_id


async def test_usage_does_not_depend_on_how_many_workers_it_took() -> None:
    async with running_mesh(paced()) as mesh:
        answer = start(mesh)
        await under_way(mesh.worker)
        mesh.worker.restart("second")
        mesh.scheduler.add(mesh.worker.identity())
        usage = (await answer).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 60)


async def test_requests_move_at_once_from_a_worker_that_refuses_connections() -> None:
    dying, other = paced(), paced(worker_id="decode-1")
    async with running_mesh(dying, other) as mesh:
        answers = [start(mesh, 100) for _ in range(10)]
        await under_way(dying)
        killed_at = time.monotonic()
        await dying.stop()
        for answer in answers:
            assert (await answer).token_ids == oracle_tokens(PROMPT, 100)
        # Its grace is a minute.
        assert time.monotonic() - killed_at < 30
        assert len(other.submissions) == 10
        # Its lease has not ended: it is placed on, refuses, and costs nothing either.
        assert (await start(mesh, 20)).token_ids == oracle_tokens(PROMPT, 20)
        assert mesh.scheduler.queries[-1].attempt == 2


async def test_a_worker_that_was_left_alive_is_fenced() -> None:
    behind_a_proxy, other = paced(), paced(worker_id="decode-1")
    async with running_mesh(behind_a_proxy, other) as mesh:
        answer = start(mesh)
        await under_way(behind_a_proxy)
        behind_a_proxy.unreachable = True
        behind_a_proxy.break_streams()
        await under_way(other)
        behind_a_proxy.unreachable = False
        later = start(mesh)
        assert (await answer).token_ids == (await later).token_ids == oracle_tokens(PROMPT, 60)
        assert not behind_a_proxy.hellos[-1].resume
        assert len(other.submissions) == 1


async def test_a_refused_request_may_stay_with_its_worker() -> None:
    async with running_mesh(paced(), dispatch=dispatch(attempts=1)) as mesh:
        answer = start(mesh)
        await under_way(mesh.worker)
        mesh.worker.unreachable = True
        mesh.worker.break_streams()
        await eventually(lambda: len(mesh.scheduler.queries) >= 3)
        mesh.worker.unreachable = False
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert len(mesh.worker.submissions) == 1


async def test_requests_move_when_the_grace_is_over() -> None:
    dying, other = paced(grace_ms=200), paced(worker_id="decode-1")
    async with running_mesh(dying, other) as mesh:
        answer = start(mesh)
        await under_way(dying)
        dying.silent = True
        dying.break_streams()
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert list(mesh.scheduler.queries[-1].avoid_worker_ids) == ["decode-0"]
        assert len(other.submissions) == 1
        await eventually(lambda: len(mesh.scheduler.outcomes) == 2)
        assert [outcome.outcome for outcome in mesh.scheduler.outcomes] == [4, 1]


async def test_requests_move_as_soon_as_the_lease_is_over() -> None:
    frozen, other = paced(), paced(worker_id="decode-1")
    async with running_mesh(frozen, other) as mesh:
        answer = start(mesh)
        await under_way(frozen)
        frozen.running.clear()
        frozen.unreachable = True
        mesh.scheduler.remove("decode-0")
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert len(other.submissions) == 1


async def test_requests_move_when_the_engine_fails() -> None:
    failing, other = paced(), paced(worker_id="decode-1")
    async with running_mesh(failing, other) as mesh:
        answer = start(mesh)
        await under_way(failing)
        failing.fail(EngineFailed("the rank died"))
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert len(other.submissions) == 1


async def test_an_answer_with_a_spent_grammar_continues() -> None:
    async with running_mesh(paced()) as mesh:
        answer = start(mesh)
        await under_way(mesh.worker)
        mesh.worker.fail(GrammarSpent("another answer made it too complex"))
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)
        assert len(mesh.worker.submissions) == 2


async def test_a_worker_without_room_is_avoided() -> None:
    full, other = FakeDecodeWorker(refusals=[WorkerFull("no room")]), FakeDecodeWorker(worker_id="decode-1")
    async with running_mesh(full, other) as mesh:
        assert (await start(mesh)).token_ids == oracle_tokens(PROMPT, 60)
        assert [list(query.avoid_worker_ids) for query in mesh.scheduler.queries] == [[], ["decode-0"]]
        assert [query.attempt for query in mesh.scheduler.queries] == [1, 2]


async def test_the_only_worker_is_asked_again() -> None:
    async with running_mesh(FakeDecodeWorker(refusals=[WorkerFull("no room")])) as mesh:
        assert (await start(mesh)).token_ids == oracle_tokens(PROMPT, 60)
        assert len(mesh.worker.submissions) == 2


async def test_placing_again_ends_with_overloaded_where_nobody_has_room() -> None:
    refusals: list[MeshError] = [WorkerFull("no room") for _ in range(5)]
    async with running_mesh(FakeDecodeWorker(refusals=refusals), dispatch=dispatch(attempts=3)) as mesh:
        error = await refused(start(mesh))
        assert isinstance(error, Overloaded)
        assert error.retry_after_ms is not None
        assert len(mesh.scheduler.queries) == 3


async def test_a_worker_gone_for_good_ends_the_request() -> None:
    async with running_mesh(paced(grace_ms=100), dispatch=dispatch(attempts=2, worker_seconds=0.2)) as mesh:
        answer = start(mesh)
        await under_way(mesh.worker)
        mesh.worker.unreachable = True
        mesh.worker.break_streams()
        mesh.scheduler.remove("decode-0")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc_error(caught.value).reason == "WORKER_LOST"


async def test_a_request_that_finds_no_worker_waits_for_one() -> None:
    async with running_mesh(dispatch=dispatch(attempts=2)) as mesh:
        await eventually(lambda: mesh.gateway.available)
        mesh.scheduler.remove("decode-0")
        answer = start(mesh, 5)
        await eventually(lambda: len(mesh.scheduler.queries) >= 5)
        mesh.scheduler.add(mesh.worker.identity())
        assert (await answer).token_ids == oracle_tokens(PROMPT, 5)


async def test_a_request_without_a_worker_is_told_so() -> None:
    async with running_mesh(dispatch=dispatch(worker_seconds=0.2)) as mesh:
        await eventually(lambda: mesh.gateway.available)
        mesh.scheduler.remove("decode-0")
        assert isinstance(await refused(start(mesh)), NoWorker)
        assert len(mesh.scheduler.queries) > 2


async def test_a_request_waits_for_the_only_workers_restart() -> None:
    async with running_mesh(
        paced(grace_ms=100), dispatch=dispatch(attempts=2), limits=limits(stalled_seconds=1.0)
    ) as mesh:
        answer = start(mesh)
        await under_way(mesh.worker)
        mesh.scheduler.remove("decode-0")
        before = len(mesh.scheduler.queries)
        await eventually(lambda: len(mesh.scheduler.queries) >= before + 8)
        mesh.worker.restart("second")
        mesh.scheduler.add(mesh.worker.identity())
        assert (await answer).token_ids == oracle_tokens(PROMPT, 60)


async def test_a_worker_that_never_answers_is_given_up() -> None:
    silent = FakeDecodeWorker()
    silent.unreachable = True
    other = FakeDecodeWorker(worker_id="decode-1")
    async with running_mesh(silent, other, dispatch=dispatch(attach_seconds=0.2)) as mesh:
        assert (await start(mesh)).token_ids == oracle_tokens(PROMPT, 60)


async def test_a_worker_that_says_it_stops_is_left_at_once() -> None:
    stopping, other = FakeDecodeWorker(refusals=[ShuttingDown("bye")]), FakeDecodeWorker(worker_id="decode-1")
    async with running_mesh(stopping, other) as mesh:
        assert (await start(mesh)).token_ids == oracle_tokens(PROMPT, 60)


async def test_what_the_worker_finds_wrong_with_the_request_is_final() -> None:
    async with running_mesh(FakeDecodeWorker(refusals=[InvalidRequest("no such token", field="prompt")])) as mesh:
        error = await refused(start(mesh))
        assert isinstance(error, InvalidRequest)
        assert error.message == "no such token"
        assert len(mesh.worker.submissions) == 1

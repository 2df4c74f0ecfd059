import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from deepmesh.internal.v1 import scheduler_pb2, targets_pb2, workers_pb2

from mesh.blocks import chain_hashes
from mesh.errors import (
    ContextExceeded,
    InvalidRequest,
    LeaseConflict,
    LeaseExpired,
    MeshError,
    NamespaceMismatch,
    NoWorker,
    Overloaded,
    UnknownModel,
)
from mesh.rpc.failures import from_rpc_error
from tests.support.scheduler_server import (
    ReportingWorker,
    identity_message,
    running_scheduler,
    scheduler_stub,
    status_message,
)
from tests.support.waiting import eventually

PROMPT = list(range(640))


def place_request(request_id: str = "r", **changes: Any) -> scheduler_pb2.PlaceRequest:
    values: dict[str, Any] = {
        "model": "oracle",
        "prompt_tokens": len(PROMPT),
        "max_tokens": 100,
        "block_hashes": chain_hashes(PROMPT),
        **changes,
    }
    return scheduler_pb2.PlaceRequest(**{"request_id": request_id, "generation_id": request_id, **values})


async def start_worker(stub: Any, worker_id: str, **status: Any) -> ReportingWorker:
    return await ReportingWorker(stub, identity_message(worker_id)).start(**status)


async def start_prefill(stub: Any, worker_id: str, **identity: Any) -> ReportingWorker:
    message = identity_message(worker_id, role=workers_pb2.WORKER_ROLE_PREFILL, **identity)
    return await ReportingWorker(stub, message).start()


async def watched(stub: Any) -> list[scheduler_pb2.WorkerStatus]:
    call = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
    response = await call.read()
    call.cancel()
    return list(response.workers)


async def until_watched(stub: Any, condition: Callable[[list[scheduler_pb2.WorkerStatus]], bool]) -> None:
    async def as_wanted() -> bool:
        return condition(await watched(stub))

    await eventually(as_wanted)


async def stream_error(call: Any) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def test_a_request_is_placed_where_its_prefix_is_cached() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "a")
        events = scheduler_pb2.KvEvents(snapshot=True, stored=chain_hashes(PROMPT)[:5])
        await start_worker(stub, "b", kv_events=events)
        response = await stub.Place(place_request("r1"))
        assert response.decode == targets_pb2.WorkerTarget(
            worker_id="b", incarnation="first", endpoint="b:1", draft_layers=0
        )
        assert not response.HasField("prefill")
        assert list(response.cached_prefixes) == [scheduler_pb2.CachedPrefix(source_id="b", blocks=5)]
        assert response.predicted_ttft_ms == pytest.approx(320)
        decisions = (await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest())).decisions
        assert [(d.request_id, d.worker_id, d.reason) for d in decisions] == [("r1", "b", response.reason)]
        assert {c.worker_id: (c.cached_blocks, bool(c.rejected)) for c in decisions[0].candidates} == {
            "a": (0, True),
            "b": (5, False),
        }


async def test_answer_and_decision_name_a_pairs_prefill_worker() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "d")
        await start_prefill(stub, "p", slot_bytes=65536)
        response = await stub.Place(place_request("r1"))
        assert response.decode.worker_id == "d"
        assert response.prefill == targets_pb2.WorkerTarget(
            worker_id="p", incarnation="first", endpoint="p:1", slot_bytes=65536, draft_layers=0
        )
        candidates = (await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest())).decisions[0].candidates
        assert [(c.worker_id, c.prefill_worker_id, bool(c.rejected)) for c in candidates] == [
            ("d", "p", False),
            ("d", "", True),
        ]


async def test_an_answer_names_the_ranks_of_its_workers() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        idle = workers_pb2.RankStatus(load=workers_pb2.WorkerLoad(free_blocks=500))
        busy = workers_pb2.RankStatus(load=workers_pb2.WorkerLoad(free_blocks=500, queued_prefill_tokens=9000))
        identity = identity_message("p", role=workers_pb2.WORKER_ROLE_PREFILL, ranks=2)
        await ReportingWorker(stub, identity).start(ranks=[busy, idle])
        await ReportingWorker(stub, identity_message("d", ranks=2, can_prefill=False)).start(ranks=[idle, busy])
        response = await stub.Place(place_request("r1"))
        assert (response.HasField("decode_rank"), response.decode_rank, response.prefill_rank) == (True, 0, 1)


async def test_an_answer_names_no_rank_of_single_ranks() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "d")
        assert not (await stub.Place(place_request("r1"))).HasField("decode_rank")


async def test_a_prefill_worker_that_failed_the_request_is_avoided() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "d")
        await start_prefill(stub, "p")
        response = await stub.Place(place_request("r1", attempt=2, avoid_worker_ids=["p"]))
        assert (response.decode.worker_id, response.HasField("prefill")) == ("d", False)


async def test_workers_that_cannot_exchange_kv_are_refused_with_what_differs() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await ReportingWorker(stub, identity_message("d", can_prefill=False)).start()
        other = workers_pb2.KvNamespace(
            weights_fingerprint="g", dtype="oracle", scale=1.0, layers=1, block_tokens=64, layout="oracle"
        )
        await start_prefill(stub, "p", kv_namespace=other)
        with pytest.raises(NamespaceMismatch, match="weights_fingerprint f against g"):
            await stub.Place(place_request())


async def test_watchers_see_prefill_workers_and_what_was_transferred() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        transfers = workers_pb2.TransferStatus(open_landings=1, total_slots=8, received_bytes={"tcp": 4096})
        worker = await start_prefill(stub, "p")
        await worker.report(transfers=transfers)
        shown = (await watched(stub))[0]
        assert (shown.identity.role, shown.transfers) == (workers_pb2.WORKER_ROLE_PREFILL, transfers)


async def test_removed_blocks_no_longer_attract() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        # If two had the same load, the one that measured a moment earlier might be thought the quicker.
        hashes, busier = chain_hashes(PROMPT), workers_pb2.WorkerLoad(running_requests=1, free_blocks=1000)
        await start_worker(stub, "a")
        stored = scheduler_pb2.KvEvents(snapshot=True, stored=hashes)
        worker = await start_worker(stub, "b", load=busier, kv_events=stored)
        assert (await stub.Place(place_request("first"))).decode.worker_id == "b"
        await worker.report(load=busier, kv_events=scheduler_pb2.KvEvents(removed=hashes))
        assert (await stub.Place(place_request())).decode.worker_id == "a"


async def test_a_burst_between_two_statuses_spreads_over_the_workers() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        for name in "abcd":
            await start_worker(stub, name)
        responses = await asyncio.gather(*(stub.Place(place_request(f"r{number}")) for number in range(100)))
        assert Counter(response.decode.worker_id for response in responses) == dict.fromkeys("abcd", 25)


async def test_reported_outcomes_are_kept_once_and_shape_the_expected_length() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "a", load=workers_pb2.WorkerLoad(free_blocks=100))
        await stub.Place(place_request("r1", max_tokens=2000))
        report = scheduler_pb2.ReportOutcomeRequest(
            generation_id="r1", worker_id="a", outcome=scheduler_pb2.PLACEMENT_OUTCOME_FINISHED, output_tokens=2000
        )
        await stub.ReportOutcome(report)
        report.outcome = scheduler_pb2.PLACEMENT_OUTCOME_FAILED
        await stub.ReportOutcome(report)
        await stub.Place(place_request("r2", max_tokens=2000))
        listed = await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest())
        newer, older = listed.decisions
        assert older.outcome == scheduler_pb2.PLACEMENT_OUTCOME_FINISHED
        assert newer.outcome == scheduler_pb2.PLACEMENT_OUTCOME_UNSPECIFIED
        # 640 + 256 tokens take 14 blocks, 640 + 2000 take 42.
        assert (older.candidates[0].slots_left, newer.candidates[0].slots_left) == (7, 2)


async def test_the_decisions_of_one_request_are_listed() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "a")
        for request_id, attempt in (("r1", 0), ("r2", 0), ("r1", 1)):
            await stub.Place(place_request(request_id, attempt=attempt))
        listed = await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest(request_id="r1"))
        assert [(d.request_id, d.attempt) for d in listed.decisions] == [("r1", 1), ("r1", 0)]


async def test_unknown_models_and_models_without_workers_are_told_apart() -> None:
    async with running_scheduler(lease={"seconds": 0.3}) as endpoint, scheduler_stub(endpoint) as stub:
        with pytest.raises(UnknownModel):
            await stub.Place(place_request())
        worker = await start_worker(stub, "a")
        worker.stop()
        await until_watched(stub, lambda workers: not workers)
        with pytest.raises(NoWorker):
            await stub.Place(place_request())


async def test_a_worker_whose_stream_broke_is_avoided() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        broken = await start_worker(stub, "a")
        await start_worker(stub, "b", load=workers_pb2.WorkerLoad(running_requests=5, free_blocks=1000))
        broken.stop()

        async def avoided() -> bool:
            return bool((await stub.Place(place_request())).decode.worker_id == "b")

        await eventually(avoided)
        (decision,) = (await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest(limit=1))).decisions
        assert {c.worker_id: c.rejected for c in decision.candidates} == {"a": "a status stream is broken", "b": ""}


@pytest.mark.parametrize("state", [workers_pb2.WORKER_STATE_DRAINING, workers_pb2.WORKER_STATE_STALLED])
async def test_a_worker_that_drains_or_stalls_gets_nothing(state: workers_pb2.WorkerState) -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        worker = await start_worker(stub, "a")
        await worker.report(state=state)
        with pytest.raises(NoWorker):
            await stub.Place(place_request())
        await worker.report(state=workers_pb2.WORKER_STATE_SERVING)
        assert (await stub.Place(place_request())).decode.worker_id == "a"


async def test_a_full_mesh_refuses_with_a_delay() -> None:
    async with running_scheduler(placement={"queue_requests": 0}) as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "a", load=workers_pb2.WorkerLoad(running_requests=8, free_blocks=1000))
        with pytest.raises(Overloaded) as caught:
            await stub.Place(place_request("r1"))
        assert caught.value.retry_after_ms is not None
        listed = await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest())
        assert [(d.worker_id, d.candidates[0].rejected) for d in listed.decisions] == [
            ("", "no slot, and its queue is full (0 requests)")
        ]


async def test_an_objective_that_cannot_be_met_refuses() -> None:
    async with running_scheduler(objectives={"ttft_ms": 100}) as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "a")
        with pytest.raises(Overloaded):
            await stub.Place(place_request())
        assert (await stub.Place(place_request("short", prompt_tokens=64, block_hashes=[]))).decode.worker_id == "a"


async def test_a_request_over_every_context_is_invalid() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "a")
        with pytest.raises(ContextExceeded):
            await stub.Place(place_request(max_tokens=4000))


@pytest.mark.parametrize(
    "bad",
    [
        {"model": ""},
        {"model": "m" * 300},
        {"request_id": "r" * 300},
        {"generation_id": ""},
        {"prompt_tokens": 0, "block_hashes": []},
        {"max_tokens": 0},
        {"block_hashes": [b"short"]},
        {"block_hashes": chain_hashes(PROMPT) * 2},
        {"avoid_worker_ids": [str(number) for number in range(2000)]},
    ],
    ids=lambda bad: next(iter(bad)),
)
async def test_a_malformed_placement_is_refused_with_its_field(bad: dict[str, Any]) -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        await start_worker(stub, "a")
        request = place_request()
        for field, value in bad.items():
            request.ClearField(field)
            if isinstance(value, list):
                getattr(request, field).extend(value)
            else:
                setattr(request, field, value)
        with pytest.raises(InvalidRequest) as caught:
            await stub.Place(request)
        assert caught.value.metadata["field"] in bad


@pytest.mark.parametrize(
    "message",
    [
        status_message(),
        status_message(identity=identity_message("")),
        status_message(identity=identity_message("a", role=workers_pb2.WORKER_ROLE_UNSPECIFIED)),
        status_message(identity=identity_message("a", total_blocks=0)),
        status_message(identity=identity_message("a", kv_namespace=workers_pb2.KvNamespace(block_tokens=32))),
        status_message(identity=identity_message("a"), kv_events=scheduler_pb2.KvEvents(stored=[b"short"])),
    ],
    ids=["no identity", "no id", "no role", "no blocks", "other blocks", "bad hash"],
)
async def test_a_malformed_status_ends_its_stream(message: scheduler_pb2.ReportStatusRequest) -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        call = stub.ReportStatus()
        await call.write(message)
        assert isinstance(await stream_error(call), InvalidRequest)


async def test_a_second_process_of_one_worker_id_is_refused() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        first = await start_worker(stub, "a")
        other = ReportingWorker(stub, identity_message("a", incarnation="second"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.start()
        assert isinstance(from_rpc_error(caught.value), LeaseConflict)
        first.stop()

        async def taken() -> bool:
            try:
                await other.start()
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually(taken)
        assert [worker.identity.incarnation for worker in await watched(stub)] == ["second"]


async def test_a_silent_worker_is_lost_and_starts_again() -> None:
    async with running_scheduler(lease={"seconds": 0.3}) as endpoint, scheduler_stub(endpoint) as stub:
        worker = await start_worker(stub, "a")
        await until_watched(stub, lambda workers: not workers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.report()
        assert isinstance(from_rpc_error(caught.value), LeaseExpired)


async def test_watchers_see_the_registry_at_once_and_after_each_change() -> None:
    async with running_scheduler(lease={"seconds": 60}) as endpoint, scheduler_stub(endpoint) as stub:
        call = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        assert list((await call.read()).workers) == []
        worker = await start_worker(stub, "a", kv_events=scheduler_pb2.KvEvents(snapshot=True))
        (status,) = (await call.read()).workers
        assert status.identity == identity_message("a")
        assert 0 < status.lease_remaining.ToMilliseconds() <= 60_000
        await worker.report(state=workers_pb2.WORKER_STATE_DRAINING)
        response = await call.read()
        assert response.workers[0].state == workers_pb2.WORKER_STATE_DRAINING
        assert response.lease.ToMilliseconds() == 60_000
        await worker.report(leaving=True)
        assert list((await call.read()).workers) == []
        call.cancel()


async def test_watchers_hear_at_once_of_a_worker_whose_stream_broke() -> None:
    async with running_scheduler(lease={"seconds": 60}) as endpoint, scheduler_stub(endpoint) as stub:
        worker = await start_worker(stub, "a")
        call = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        (status,) = (await call.read()).workers
        assert not status.silent
        worker.stop()
        (status,) = (await call.read()).workers
        assert status.silent
        call.cancel()


async def test_watchers_beyond_the_limit_are_refused() -> None:
    async with running_scheduler(max_watchers=1) as endpoint, scheduler_stub(endpoint) as stub:
        first = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        await first.read()
        second = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        assert isinstance(await stream_error(second), Overloaded)
        first.cancel()

        async def let_in() -> bool:
            try:
                await watched(stub)
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually(let_in)


async def test_a_watcher_that_never_reads_delays_nobody() -> None:
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub, scheduler_stub(endpoint) as lazy:
        sleeping = [lazy.WatchWorkers(scheduler_pb2.WatchWorkersRequest()) for _ in range(20)]
        worker = await start_worker(stub, "a")
        for number in range(200):
            state = workers_pb2.WORKER_STATE_DRAINING if number % 2 else workers_pb2.WORKER_STATE_SERVING
            await worker.report(state=state)
        assert (await watched(stub))[0].state == workers_pb2.WORKER_STATE_DRAINING
        for call in sleeping:
            call.cancel()

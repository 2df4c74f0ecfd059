from typing import Any

from deepmesh.internal.v1 import scheduler_pb2, workers_pb2

from cli.kv_moves import KvMoves, moves_between


def worker(incarnation: str = "1", worker_id: str = "d", **transfers: Any) -> scheduler_pb2.WorkerStatus:
    identity = workers_pb2.WorkerIdentity(worker_id=worker_id, incarnation=incarnation)
    return scheduler_pb2.WorkerStatus(identity=identity, transfers=workers_pb2.TransferStatus(**transfers))


def snapshot(*workers: scheduler_pb2.WorkerStatus) -> scheduler_pb2.WatchWorkersResponse:
    store = scheduler_pb2.StoreStatus(transfers=workers_pb2.TransferStatus(received_bytes={"tcp": 9000}))
    return scheduler_pb2.WatchWorkersResponse(workers=workers, stores=[store])


def test_bytes_that_workers_received_in_between_are_summed_by_transport() -> None:
    before = snapshot(worker(received_bytes={"tcp": 10, "posix": 5}, fetched_blocks=2))
    after = snapshot(
        worker(received_bytes={"tcp": 40, "posix": 5}, fetched_blocks=5),
        worker(worker_id="p", received_bytes={"posix": 7}, fetched_blocks=1),
    )
    assert moves_between(before, after) == KvMoves({"tcp": 30, "posix": 7}, 4)


def test_a_worker_that_was_started_in_between_began_at_nothing() -> None:
    before = snapshot(worker("1", received_bytes={"tcp": 100}, fetched_blocks=9))
    assert moves_between(before, snapshot(worker("2", received_bytes={"tcp": 30}))) == KvMoves({"tcp": 30}, 0)


def test_without_transfers_no_transport_is_named() -> None:
    still = snapshot(worker(received_bytes={"tcp": 100}))
    assert moves_between(still, still) == KvMoves({}, 0)

"""What the page makes of the scheduler's messages."""

from deepmesh.internal.v1 import scheduler_pb2, workers_pb2

from gateway.page import wire


def test_ranks_have_their_load_and_equal_parts() -> None:
    identity = workers_pb2.WorkerIdentity(worker_id="decode-0", max_requests=16, total_blocks=200, ranks=2)
    loads = [
        workers_pb2.WorkerLoad(running_requests=running, waiting_requests=1, free_blocks=90, queued_prefill_tokens=7)
        for running in (3, 5)
    ]
    ranks = [workers_pb2.RankStatus(load=load, cached_blocks=4) for load in loads]
    (worker,) = wire.workers([scheduler_pb2.WorkerStatus(identity=identity, ranks=ranks)])
    shown = worker.ranks
    assert [rank.running for rank in shown] == [3, 5]
    assert [(each.waiting, each.max_requests, each.queued_prefill_tokens) for each in shown] == [(1, 8, 7)] * 2
    assert [(each.free_blocks, each.total_blocks, each.cached_blocks) for each in shown] == [(90, 100, 4)] * 2


def test_a_prefill_worker_with_unreadable_kv_is_shown() -> None:
    def identity(worker_id: str, role: workers_pb2.WorkerRole, dtype: str) -> scheduler_pb2.WorkerStatus:
        namespace = workers_pb2.KvNamespace(weights_fingerprint="f", dtype=dtype, layers=1, layout="mla:512+64")
        return scheduler_pb2.WorkerStatus(
            identity=workers_pb2.WorkerIdentity(
                worker_id=worker_id, role=role, model="r1", kv_namespace=namespace, receives_kv=True
            )
        )

    prefill = identity("prefill-0", workers_pb2.WORKER_ROLE_PREFILL, "bfloat16")
    decode = identity("decode-0", workers_pb2.WORKER_ROLE_DECODE, "float8_e4m3fn")
    shown = {each.worker_id: each.kv_unreadable for each in wire.workers([prefill, decode])}
    assert shown == {"prefill-0": "dtype bfloat16 against float8_e4m3fn", "decode-0": ""}


def test_a_placement_names_the_rank_among_several() -> None:
    taken = scheduler_pb2.Candidate(worker_id="decode-0", rank=0)
    other = scheduler_pb2.Candidate(worker_id="decode-0", rank=1, rejected="busy")
    shown = wire.decision(scheduler_pb2.Decision(worker_id="decode-0", candidates=[taken, other]))
    assert (shown.rank, shown.rejected) == (0, ["decode-0 rank 1: busy"])
    alone = scheduler_pb2.Candidate(worker_id="decode-0")
    assert wire.decision(scheduler_pb2.Decision(worker_id="decode-0", candidates=[alone])).rank is None

"""What the page makes of the scheduler's messages."""

from deepmesh.internal.v1 import scheduler_pb2, workers_pb2

from gateway.page import wire


def test_ranks_have_their_own_load_and_equal_parts_of_the_worker() -> None:
    identity = workers_pb2.WorkerIdentity(worker_id="decode-0", max_requests=16, total_blocks=200, ranks=2)
    loads = [
        workers_pb2.WorkerLoad(running_requests=running, waiting_requests=1, free_blocks=90, queued_prefill_tokens=7)
        for running in (3, 5)
    ]
    ranks = [workers_pb2.RankStatus(load=load, cached_blocks=4) for load in loads]
    shown = wire.worker(scheduler_pb2.WorkerStatus(identity=identity, ranks=ranks)).ranks
    assert [rank.running for rank in shown] == [3, 5]
    assert [(each.waiting, each.max_requests, each.queued_prefill_tokens) for each in shown] == [(1, 8, 7)] * 2
    assert [(each.free_blocks, each.total_blocks, each.cached_blocks) for each in shown] == [(90, 100, 4)] * 2


def test_a_placement_names_the_rank_of_a_worker_that_has_several() -> None:
    taken = scheduler_pb2.Candidate(worker_id="decode-0", rank=0)
    other = scheduler_pb2.Candidate(worker_id="decode-0", rank=1, rejected="busy")
    shown = wire.decision(scheduler_pb2.Decision(worker_id="decode-0", candidates=[taken, other]))
    assert (shown.rank, shown.rejected) == (0, ["decode-0 rank 1: busy"])
    alone = scheduler_pb2.Candidate(worker_id="decode-0")
    assert wire.decision(scheduler_pb2.Decision(worker_id="decode-0", candidates=[alone])).rank is None

import msgspec
import pytest

from mesh.domain.workers import HostTierStatus, PromptPace, TransferCounters, WorkerLoad, WorkerSpeed
from mesh.errors import CheckpointError
from tests.support.decoding import READY
from worker.merging import merge_loads, merge_ready, merge_transfers

NAMES = ["rank 0", "rank 1"]


def test_reports_of_a_single_rank_stay_as_they_are() -> None:
    load, transfers = WorkerLoad(running_requests=3), TransferCounters(fetches=2)
    assert merge_ready([READY], NAMES) is READY
    assert merge_loads([load]) is load
    assert merge_transfers([transfers]) is transfers


def test_ranks_blocks_add_up_and_the_least_pool_bounds_context() -> None:
    small = msgspec.structs.replace(READY, total_blocks=10, context_tokens=640)
    merged = merge_ready([READY, small], NAMES)
    assert (merged.total_blocks, merged.max_requests, merged.context_tokens) == (110, 8, 640)
    assert merged.namespace == READY.namespace


def test_ranks_of_different_weights_are_no_worker() -> None:
    namespace = msgspec.structs.replace(READY.namespace, weights_fingerprint="other")
    with pytest.raises(
        CheckpointError, match="rank 1 has loaded another model than rank 0: its weights_fingerprint is other,"
    ):
        merge_ready([READY, msgspec.structs.replace(READY, namespace=namespace)], NAMES)


def test_a_worker_is_as_fast_as_its_slowest_rank() -> None:
    one, other = WorkerSpeed(10.0, 8.0, PromptPace(900.0)), WorkerSpeed(12.0, 8.0, PromptPace(1000.0))
    ranks = [msgspec.structs.replace(READY, speed=speed) for speed in (one, other)]
    assert merge_ready(ranks, NAMES).speed == WorkerSpeed(12.0, 8.0, PromptPace(900.0))
    assert merge_ready([*ranks, READY], [*NAMES, "rank 2"]).speed is None


def test_loads_add_up_and_times_are_means() -> None:
    one = WorkerLoad(1, 2, 100, 50, 1000.0, 10.0, 40.0, 4.0, None)
    two = WorkerLoad(3, 0, 10, 60, 500.0, 20.0, 60.0, 6.0, 8.0)
    idle = WorkerLoad(free_blocks=70)
    assert merge_loads([one, two, idle]) == WorkerLoad(4, 2, 110, 180, 1500.0, 15.0, 50.0, 10.0, 8.0)


def test_host_memories_add_up_and_their_rate_is_a_mean() -> None:
    tiers = [HostTierStatus(10, 4, 5, 3, 100.0), HostTierStatus(10, 0), HostTierStatus(10, 6, 7, 1, 300.0)]
    merged = merge_loads([WorkerLoad(host_tier=tier) for tier in (*tiers, None)])
    assert merged.host_tier == HostTierStatus(30, 10, 12, 4, 200.0)


def test_paces_of_prompts_add_up_at_their_mean_context() -> None:
    one = WorkerLoad(exact_prompts=PromptPace(1000.0, 400.0), queued_sparse_tokens=5, waiting_blocks=3)
    two = WorkerLoad(exact_prompts=PromptPace(3000.0, 800.0), sparse_prompts=PromptPace(9000.0, 30.0))
    merged = merge_loads([one, two, WorkerLoad(queued_sparse_tokens=7, waiting_blocks=4)])
    assert (merged.exact_prompts, merged.sparse_prompts) == (PromptPace(4000.0, 700.0), PromptPace(9000.0, 30.0))
    assert (merged.queued_sparse_tokens, merged.waiting_blocks) == (12, 7)


def test_steps_of_ranks_have_the_mean_of_their_tokens() -> None:
    """Two steps a second of 500 tokens, and three of 1,000."""
    small, large = PromptPace(1000.0, 0.0, 500.0), PromptPace(3000.0, 0.0, 1000.0)
    merged = merge_loads([WorkerLoad(exact_prompts=small), WorkerLoad(exact_prompts=large)])
    assert merged.exact_prompts == PromptPace(4000.0, 0.0, 800.0)


def test_transfers_add_up_by_name() -> None:
    one = TransferCounters(1, 2, 3, 8, 7, 0, {"tcp": 5}, {"tcp": 1}, {"replayed": 1}, 4, 40, 100.0)
    two = TransferCounters(1, 0, 0, 8, 8, 1, {"tcp": 5, "posix": 2}, {}, {"replayed": 2}, 1, 10, None)
    expected = TransferCounters(2, 2, 3, 16, 15, 1, {"tcp": 10, "posix": 2}, {"tcp": 1}, {"replayed": 3}, 5, 50, 100.0)
    assert merge_transfers([one, two]) == expected


def test_bytes_over_tcp_add_up_by_their_sender() -> None:
    ranks = [TransferCounters(local_tcp_bytes={"prefill-0": 5}), TransferCounters(local_tcp_bytes={"prefill-0": 2})]
    assert merge_transfers(ranks).local_tcp_bytes == {"prefill-0": 7}

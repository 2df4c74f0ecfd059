"""Cached prefixes weighed by where they are: computed again, in the worker, in a store."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.costs import CostModel
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import HostTierStatus, TransferCounters
from scheduler.placement.candidates import Candidates, CandidateWorker, PlacementRequest
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import paces
from scheduler.placement.predict import predict
from scheduler.placement.times import Source, source
from tests.support.scheduling import NAMESPACE, choose, make_candidate, make_constants, make_load, make_request

# A candidate computes a block in 64 ms; a block is 1 MB.
CONSTANTS = Constants()
STORE = StoreTarget("store", 9)


def found_by(
    candidate: CandidateWorker, store: StoreTarget | None, request: PlacementRequest | None = None, **costs: Any
) -> Source:
    """What a worker does that is alone in the mesh, with the constants above or other ones."""
    constants = replace(CONSTANTS, costs=CostModel(**costs))
    ((pace,), _) = paces(Candidates([candidate], stores={NAMESPACE: store} if store else {}), constants)
    return source(request or make_request(), candidate, pace, store, 0.0, constants)


def test_a_store_that_has_more_is_asked_for_it() -> None:
    found = found_by(make_candidate(cached_blocks=3), STORE)
    assert (found.store, found.cached_blocks, found.uncached_tokens) == (STORE, 9, 64)
    # Six blocks fetched, one computed.
    assert found.ms == pytest.approx(2 + 6 + 64)


def test_a_store_that_has_no_more_is_not_asked() -> None:
    found = found_by(make_candidate(cached_blocks=9), STORE)
    assert (found.store, found.cached_blocks) == (None, 9)


@pytest.mark.parametrize(("bytes_per_second", "chosen"), [(1e9, True), (15.7e6, True), (15.5e6, False), (1e3, False)])
def test_a_store_slower_than_recomputing_is_not_chosen(bytes_per_second: float, chosen: bool) -> None:
    # 1 MB at 15.6 MB/s takes as long as 64 tokens at 1000/s.
    constants = make_constants(costs=CostModel(fetch_latency_ms=0.0, fetch_bytes_per_second=bytes_per_second))
    decode = make_candidate("d")
    best = choose(predict(make_request(), Candidates([decode], [], {NAMESPACE: STORE}), constants))
    assert best is not None
    assert (best.store == STORE) is chosen
    assert best.uncached_tokens == (64 if chosen else 640)


def test_blocks_in_host_memory_cost_their_copy() -> None:
    found = found_by(make_candidate(cached_blocks=3, host_blocks=5), None, host_read_bytes_per_second=1e9)
    assert (found.store, found.cached_blocks, found.uncached_tokens) == (None, 8, 128)
    # Five blocks copied, two computed.
    assert found.ms == pytest.approx(5 + 2 * 64)
    measured = make_load(host_tier=HostTierStatus(100, 50, read_bytes_per_second=1e8))
    slow = found_by(make_candidate(cached_blocks=3, host_blocks=5, load=measured), None, host_read_bytes_per_second=1e9)
    assert slow.ms == pytest.approx(50 + 2 * 64)


def test_a_store_is_asked_for_what_host_memory_lacks() -> None:
    found = found_by(make_candidate(cached_blocks=3, host_blocks=4), STORE, host_read_bytes_per_second=1e9)
    assert (found.store, found.cached_blocks) == (STORE, 9)
    # Four blocks copied, two fetched, one computed.
    assert found.ms == pytest.approx(4 + 2 + 2 + 64)
    assert found_by(make_candidate(host_blocks=9), STORE).store is None


def test_the_last_block_is_computed_whatever_host_memory_holds() -> None:
    assert found_by(make_candidate(cached_blocks=9, host_blocks=1), None).cached_blocks == 9


def test_a_pool_hit_is_better_than_one_in_host_memory() -> None:
    decode = [make_candidate("d0", host_blocks=9), make_candidate("d1", cached_blocks=9), make_candidate("d2")]
    best = sorted(predict(make_request(), Candidates(decode), CONSTANTS), key=lambda term: term.ttft_ms)
    assert [term.worker_id for term in best] == ["d1", "d0", "d2"]


ON_DISK = StoreTarget("store", 9, disk_blocks=5)


@pytest.mark.parametrize(
    ("disk_bytes_per_second", "fetched", "ms"),
    [
        # 1 MB a block: 1 ms from memory at 1 GB/s; computing takes 64 ms.
        (5e8, 9, 2 + 4 + 10 + 64),
        (20e6, 9, 2 + 4 + 250 + 64),
        # Now a block is computed sooner than it is read.
        (15e6, 4, 2 + 4 + 6 * 64),
    ],
)
def test_blocks_on_disk_are_fetched_only_where_reading_is_quicker(
    disk_bytes_per_second: float, fetched: int, ms: float
) -> None:
    constants = make_constants(
        costs=CostModel(fetch_bytes_per_second=1e9, disk_fetch_bytes_per_second=disk_bytes_per_second)
    )
    best = choose(predict(make_request(), Candidates([make_candidate("d")], [], {NAMESPACE: ON_DISK}), constants))
    assert best is not None and best.store is not None
    assert (best.store.blocks, best.cached_blocks) == (fetched, fetched)
    assert best.ttft_ms == pytest.approx(ms)


def test_a_prefix_on_a_slow_disk_is_not_fetched() -> None:
    slow = make_candidate(transfers=TransferCounters(disk_fetch_bytes_per_second=1e6))
    assert found_by(slow, StoreTarget("store", 9, disk_blocks=9)).store is None
    assert found_by(slow, StoreTarget("store", 9)).store == StoreTarget("store", 9)


def test_a_worker_pays_only_for_what_the_disk_has() -> None:
    found = found_by(
        make_candidate(cached_blocks=6, transfers=TransferCounters(disk_fetch_bytes_per_second=5e8)), ON_DISK
    )
    assert (found.store, found.cached_blocks) == (ON_DISK, 9)
    assert found.ms == pytest.approx(2 + 6 + 64)


def test_what_a_worker_measured_beats_the_configured_bandwidth() -> None:
    slow = make_candidate("slow", transfers=TransferCounters(fetch_bytes_per_second=1e6))
    assert found_by(slow, STORE).store is None


def test_a_quick_worker_recomputes_what_a_slow_one_fetches() -> None:
    quick = make_candidate("quick", load=make_load(prefill_tokens_per_second=100_000.0))
    assert found_by(quick, StoreTarget("store", 2)).store is None
    assert found_by(make_candidate("slow"), StoreTarget("store", 2)).store is not None


def test_the_last_token_is_computed_whatever_the_store_holds() -> None:
    assert found_by(make_candidate(), StoreTarget("store", 10), make_request(prompt_tokens=640)).uncached_tokens == 64


def test_a_store_of_another_namespace_is_no_source() -> None:
    other = msgspec.structs.replace(NAMESPACE, weights_fingerprint="other")
    best = choose(predict(make_request(), Candidates([make_candidate("d")], [], {other: STORE}), CONSTANTS))
    assert best is not None
    assert best.store is None


@given(st.integers(1, 2000), st.integers(0, 40), st.integers(0, 40), st.floats(1e3, 1e12), st.floats(0, 100))
def test_a_store_never_makes_it_later(
    prompt_tokens: int, cached_blocks: int, store_blocks: int, bytes_per_second: float, latency_ms: float
) -> None:
    request, candidate = make_request(prompt_tokens=prompt_tokens), make_candidate(cached_blocks=cached_blocks)
    constants = {"fetch_latency_ms": latency_ms, "fetch_bytes_per_second": bytes_per_second}
    found = found_by(candidate, StoreTarget("store", store_blocks), request, **constants)
    assert found.ms <= found_by(candidate, None, request, **constants).ms
    assert 1 <= found.uncached_tokens == prompt_tokens - 64 * found.cached_blocks

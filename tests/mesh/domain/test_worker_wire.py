from typing import Any

import pytest
from deepmesh.internal.v1 import workers_pb2
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain import worker_wire
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.workers import (
    HostTierStatus,
    PromptPace,
    TransferCounters,
    WorkerIdentity,
    WorkerLoad,
    WorkerRole,
    WorkerSpeed,
    WorkerState,
)
from mesh.errors import InvalidRequest
from worker import wire
from worker.status_report import StatusReport

# A name stands in lines of logs: no control characters, no separators.
names = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20)
counts = st.integers(0, 2**32 - 1)
positive = st.integers(1, 2**32 - 1)
one_a_rank = st.integers(64, 2**32 - 1)
sizes = st.integers(0, 2**63)
above_0 = st.floats(0, 1e6, width=32, exclude_min=True)
rates = st.none() | above_0
counted = st.dictionaries(names, sizes, max_size=4)
namespaces = st.builds(KvNamespace, names, names, counts, names, scale=st.floats(0, 1e6), block_tokens=st.just(64))
paces = st.builds(PromptPace, above_0, st.floats(0, 1e6, width=32), rates)
identities = st.builds(
    WorkerIdentity,
    worker_id=names,
    incarnation=names,
    role=st.sampled_from(WorkerRole),
    endpoint=names,
    model=names,
    kv_namespace=namespaces,
    context_tokens=positive,
    total_blocks=one_a_rank,
    max_requests=one_a_rank,
    can_prefill=st.booleans(),
    receives_kv=st.booleans(),
    layerwise_tokens=st.none() | st.integers(1, 2**32 - 1),
    slot_bytes=st.none() | st.integers(1, 2**40),
    vocabulary_size=positive,
    block_bytes=positive,
    worker_class=names,
    ranks=st.integers(1, 64),
    sparse_prefill=st.none() | st.builds(SparsePrefill, st.integers(0, 2**31 - 1), st.sampled_from([0.5, 0.95])),
    max_step_tokens=positive,
    prompt_wait_steps=counts,
    divided_tokens=st.none() | positive,
    speed=st.none() | st.builds(WorkerSpeed, above_0, above_0, paces),
)
loads = st.builds(
    WorkerLoad,
    counts,
    counts,
    sizes,
    counts,
    *[rates] * 5,
    exact_prompts=st.none() | paces,
    sparse_prompts=st.none() | paces,
    queued_sparse_tokens=sizes,
    waiting_blocks=counts,
    even_step_tokens=st.none() | positive,
    host_tier=st.none() | st.builds(HostTierStatus, sizes, sizes, sizes, sizes, st.none() | rates),
)
counters = st.builds(
    TransferCounters,
    counts,
    counts,
    counts,
    counts,
    counts,
    counts,
    counted,
    counted,
    counted,
    sizes,
    sizes,
    st.none() | rates,
)


@given(identities)
def test_who_a_worker_is_survives_the_wire(identity: WorkerIdentity) -> None:
    sent = worker_wire.identity_message(identity).SerializeToString()
    assert worker_wire.identity(workers_pb2.WorkerIdentity.FromString(sent)) == identity


@given(loads, counters)
def test_what_a_worker_reports_survives_the_wire(load: WorkerLoad, transfers: TransferCounters) -> None:
    report = StatusReport(100)
    report.observe(load, [], [], transfers)
    message = wire.status_message(report.next_report(snapshot=False), None)
    assert (worker_wire.load(message.load), worker_wire.transfers(message.transfers)) == (load, transfers)
    assert (worker_wire.state(message.state), message.HasField("identity")) == (WorkerState.SERVING, False)


def identity_message(**changes: Any) -> workers_pb2.WorkerIdentity:
    kv_namespace = workers_pb2.KvNamespace(weights_fingerprint="f", dtype="d", layers=1, block_tokens=64, layout="l")
    values: dict[str, Any] = {
        "worker_id": "a",
        "incarnation": "i",
        "role": workers_pb2.WORKER_ROLE_PREFILL,
        "endpoint": "a:1",
        "model": "m",
        "kv_namespace": kv_namespace,
        "context_tokens": 1,
        "total_blocks": 1,
        "max_requests": 1,
        "vocabulary_size": 1,
        "block_bytes": 1,
        "worker_class": "c",
        "max_step_tokens": 1,
        "ranks": 1,
    }
    return workers_pb2.WorkerIdentity(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": ""}, "identity.worker_id"),
        ({"endpoint": "e" * 300}, "identity.endpoint"),
        ({"total_blocks": 0}, "identity.total_blocks"),
        ({"total_blocks": 2, "ranks": 2}, "identity.max_requests"),
        ({"role": workers_pb2.WORKER_ROLE_UNSPECIFIED}, "identity.role"),
        ({"kv_namespace": workers_pb2.KvNamespace(block_tokens=32)}, "identity.kv_namespace.block_tokens"),
        ({"kv_namespace": workers_pb2.KvNamespace(block_tokens=64)}, "identity.kv_namespace.weights_fingerprint"),
    ],
)
def test_an_anonymous_worker_is_refused_with_the_missing_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        worker_wire.identity(identity_message(**changes))
    assert caught.value.metadata["field"] == field


def test_rates_that_are_none_read_as_unknown() -> None:
    message = workers_pb2.WorkerLoad(prefill_tokens_per_second=float("nan"), decode_step_ms=-1)
    message.mean_output_tokens = float("inf")
    message.exact_prompts.tokens_per_second = float("nan")
    assert worker_wire.load(message) == WorkerLoad()


def test_a_process_with_too_many_names_to_count_is_refused() -> None:
    message = workers_pb2.TransferStatus(refused={str(number): 1 for number in range(65)})
    with pytest.raises(InvalidRequest):
        worker_wire.transfers(message)


def test_a_state_from_the_future_takes_nothing_new() -> None:
    assert worker_wire.state(17) is WorkerState.DRAINING

import json
from pathlib import Path
from typing import Any

import pytest
from deepmesh.internal.v1 import scheduler_pb2, sparse_prefill_pb2, workers_pb2

from capacity.calibration.fit import left_out_error, prompt_times
from capacity.calibration.mesh import MeshUnderTest, costs_of_mesh, step_seconds
from capacity.calibration.rank import costs_of_rank
from capacity.calibration.sparse import sparse_pairs_ms, sparse_prompt_tokens
from capacity.calibration.transfers import transfer_rates
from capacity.calibration.workers import workers_of
from loadgen.records import RequestRecord
from mesh.errors import ConfigError
from mesh.rpc.channel import Channels
from tests.support.process_mesh import oracle_settings, process_mesh
from tests.support.scheduler_server import ReportingWorker, identity_message, running_scheduler, scheduler_stub

REPORT = {
    "shape": "r1-ep8-rank",
    "kv": "bf16",
    "experts": "fp8",
    "device": "a card",
    "decode": [
        {"requests": 8, "step_ms": 24.0, "breakdown": {"attention": 900.0}},
        {"requests": 1, "step_ms": 12.0, "breakdown": {}},
        {"requests": 64, "step_ms": 34.0, "breakdown": {"attention": 7000.0}},
    ],
    "prefill": {"tokens_per_second": 10_000.0, "breakdown": {"attention": 350.0}},
}


def saved(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**REPORT, **changes}), encoding="utf-8")
    return path


def test_the_steps_of_a_rank_become_points(tmp_path: Path) -> None:
    file = costs_of_rank(saved(tmp_path / "rank.json"))
    assert file.costs.decode_steps == ((1.0, 12.0), (8.0, 24.0), (64.0, 34.0))
    # 7 ms of attention over 64 x 3,500 tokens.
    assert file.costs.decode_context_ms == pytest.approx(7 / 0.224)
    assert file.layout == "r1-ep8-rank"


def test_a_prompt_takes_what_the_rank_measured(tmp_path: Path) -> None:
    costs = costs_of_rank(saved(tmp_path / "rank.json")).costs
    assert costs.prefill_ms(3500) == pytest.approx(350.0)
    assert costs.prefill_ms(7000) > 700.0


def test_a_rank_with_indexers_measures_selection_apart(tmp_path: Path) -> None:
    decode = [{"requests": 64, "step_ms": 34.0, "breakdown": {"attention": 4000.0, "selection": 700.0}}]
    prefill = {"tokens_per_second": 10_000.0, "breakdown": {"attention": 300.0, "selection": 50.0}}
    costs = costs_of_rank(saved(tmp_path / "rank.json", shape="v32-ep8-rank", decode=decode, prefill=prefill)).costs
    assert costs.selected_tokens == 2048 and costs.prompt_selected_tokens == 6963
    assert costs.decode_context_ms == pytest.approx(4 / (64 * 0.002048))
    assert costs.index_context_ms == pytest.approx(0.7 / 0.224)
    assert costs.step_ms(64, 64 * 3500, 0.0) == pytest.approx(34.0) and costs.prefill_ms(3500) == pytest.approx(350.0)
    assert costs.prefill_pairs_ms == pytest.approx(300 / (5 * 3500**2 / 2) * 1e6)
    assert costs.index_pairs_ms == pytest.approx(50 / (5 * 3500**2 / 2) * 1e6)


@pytest.mark.parametrize(
    ("content", "told"),
    [("{", "no report"), ('{"decode": []}', "no report"), (json.dumps({**REPORT, "decode": []}), "no decode steps")],
)
def test_what_is_no_report_of_a_rank_is_refused(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "rank.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        costs_of_rank(path)


def test_the_error_is_that_of_the_worst_point() -> None:
    assert left_out_error([(1, 10), (2, 20)]) is None
    assert left_out_error([(1, 10), (2, 20), (3, 30)]) == pytest.approx(0.0)
    assert left_out_error([(1, 10), (2, 40), (3, 30)]) == pytest.approx(0.5)


def test_costs_of_tokens_and_pairs_are_told_apart() -> None:
    points = [(tokens, 5 + 0.2 * tokens + 1e-4 * tokens**2 / 2) for tokens in (64, 512, 1024, 3072)]
    assert prompt_times(points) == pytest.approx((5.0, 0.2, 1e-4))


def test_no_part_of_a_prompts_time_is_negative() -> None:
    # Less than in proportion: a line has no pairs, and a start that explains the rest.
    assert prompt_times([(100, 25), (200, 45), (400, 85)]) == pytest.approx((5.0, 0.2, 0.0), abs=1e-9)
    # More than the pairs alone explain.
    start, token, pair = prompt_times([(100, 1), (200, 8), (400, 64)])
    assert (start, token > 0, pair > 0) == (0.0, True, True)


def test_no_two_calibrations_send_the_same_prompts() -> None:
    # The mesh would answer the second one's from its caches.
    assert MeshUnderTest("here", 1).seed != MeshUnderTest("here", 1).seed


def test_a_second_tokens_wait_is_not_a_steps() -> None:
    record = RequestRecord(0, 0.0, 6)
    for seconds, tokens in ((0.3, 1), (0.47, 1)):
        record.tokens(seconds, tokens)
    assert step_seconds(record) is None
    for seconds, tokens in ((0.57, 1), (0.77, 2)):
        record.tokens(seconds, tokens)
    assert step_seconds(record) == pytest.approx(0.1)


async def test_rates_of_transfers_are_those_that_workers_measured() -> None:
    told: list[str] = []
    async with running_scheduler() as endpoint, scheduler_stub(endpoint) as stub:
        for number, (push, fetch, read) in enumerate([(1e9, 4e8, 5e9), (3e9, 0.0, 0.0), (0.0, 2e8, 7e9)]):
            tier = workers_pb2.HostTierStatus(read_bytes_per_second=read) if read else None
            await ReportingWorker(stub, identity_message(f"decode-{number}")).start(
                load=workers_pb2.WorkerLoad(free_blocks=1000, push_bytes_per_second=push, host_tier=tier),
                transfers=workers_pb2.TransferStatus(fetch_bytes_per_second=fetch),
            )
        rates = transfer_rates(await workers_of(endpoint, Channels()), told.append)
    expected = {"push_bytes_per_second": 2e9, "fetch_bytes_per_second": 3e8, "host_read_bytes_per_second": 6e9}
    assert rates == pytest.approx(expected)
    assert told[1:] == [
        "fetches from stores' memory: 0.30 GB/s, as 2 of 3 workers measured",
        "fetches from stores' disks: not measured, since no worker made any",
        "copies from workers' host memory: 6.00 GB/s, as 2 of 3 workers measured",
    ]


def worker_status(sparse: tuple[float, float] | None = None, **identity: Any) -> scheduler_pb2.WorkerStatus:
    """sparse: tokens a second, and tokens before each."""
    load = workers_pb2.WorkerLoad()
    if sparse is not None:
        load.sparse_prompts.tokens_per_second, load.sparse_prompts.context_tokens = sparse
    return scheduler_pb2.WorkerStatus(identity=workers_pb2.WorkerIdentity(**identity), load=load)


def test_sparse_pairs_take_what_tokens_leave() -> None:
    # 0.5 ms a token with 10,000 tokens before it, of which 0.1 ms are any token's.
    workers = [worker_status((2000.0, 10_000.0)), worker_status(), worker_status((20_000.0, 10_000.0))]
    assert sparse_pairs_ms(workers[:2], 0.1) == pytest.approx(40.0)
    # One whose tokens take less than any token's has none.
    assert sparse_pairs_ms(workers, 0.1) == pytest.approx(20.0)
    assert sparse_pairs_ms(workers[1:2], 0.1) is None


def test_half_of_the_prompts_that_measure_sparse_attention_is_sparse() -> None:
    sparse = sparse_prefill_pb2.SparsePrefill(from_tokens=4096, recall=0.95)
    workers = [worker_status(context_tokens=9000), worker_status(context_tokens=100_000, sparse_prefill=sparse)]
    assert sparse_prompt_tokens(workers) == 8192
    assert sparse_prompt_tokens([worker_status(context_tokens=5000, sparse_prefill=sparse)]) == 4999
    assert sparse_prompt_tokens(workers[:1]) is None


@pytest.mark.check("fidelity")
async def test_a_running_mesh_tells_its_pace() -> None:
    settings = oracle_settings(**{"oracle.step_ms": 40, "oracle.prefill_tokens_per_second": 4000})
    async with process_mesh(settings=settings) as mesh:
        under_test = MeshUnderTest(mesh.grpc_endpoint, 1, widths=(1, 2), prompts=(256, 2048))
        costs = (await costs_of_mesh(under_test, lambda line: None)).costs
    # Never quicker than its pace; how much slower depends on the machine.
    assert costs.decode_ms(1) > 39
    assert 1000 < costs.prefill_tokens_per_second < 6000

"""Steps of several ranks with drafts, on CPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.node.measure import NodeBench, Options, PartSeconds
from bench.node.rows import Row, read_rows
from bench.rank import steps
from bench.rank.acceptance import NONE_RIGHT
from bench.rank.kernel_trace import Interval, KernelTrace
from bench.rank.model import MeasuredModel, make_rank
from capacity.ceilings import Ceilings
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.exchange.host import HostExchange
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.settings.device import Hardware, resolve
from tests.support.checkpoints import tiny_checkpoint
from tests.support.rank_threads import on_each_rank

STEPS, CONTEXT = 2, 90
LAYOUT = Layout(dp=2, ep=2)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(work: Callable[[], object]) -> KernelTrace:
        work()
        return KernelTrace([Interval("gemm", 0, 10), Interval("gather_rows", 12, 20)])

    for name in ("bench.rank.steps", "bench.node.measure"):
        monkeypatch.setattr(f"{name}.CONTEXT", CONTEXT)
    for name in ("WARM_STEPS", "TRACED_STEPS"):
        monkeypatch.setattr(steps, name, 1)
    monkeypatch.setattr(steps, "trace_kernels", trace)


def test_ranks_measure_steps_with_the_wanted_drafts_accepted(tmp_path: Path) -> None:
    directory, out = tiny_checkpoint(tmp_path, num_nextn_predict_layers=1), tmp_path / "rows"
    options = Options(LAYOUT, MeasuredModel("", 2, ""), 2, STEPS, 128, 1e9, out)
    cases = options.cases([1, 2], [(1.0, 1.0), (1.0,)])

    def act(peers: Peers) -> list[Row]:
        config = EngineConfig(
            model_dir=directory, device="cpu", threads=1, max_requests=2, total_blocks=32, max_step_tokens=128,
            random_weights=True, drafts=DraftsConfig(next_n=2, pinned_acceptance=NONE_RIGHT),
            parallel=ParallelConfig(tp=LAYOUT.tp, dp=LAYOUT.dp, ep=LAYOUT.ep),
        )  # fmt: skip
        resolved, exchange = resolve(config, Hardware(0, 1 << 30)), HostExchange(peers)
        bench = NodeBench(options, resolved, make_rank(resolved, exchange), exchange, peers)
        return bench.measure(
            cases, [Ceilings(1e11, 1e12, 2e12)] * 2, {count: PartSeconds(1e-6, 0.0) for count in (1, 2)}
        )

    rows, others = on_each_rank(LAYOUT, act)
    assert [row.case for row in rows] == cases and read_rows(out) == rows
    assert [row.tokens for row in rows] == [3, 3, 2, 2]
    assert all(row.drafts == 2 and row.step_ms > 0 < row.floor_ms and row.prompt_rate > 0 for row in rows)
    assert len(others) == len(cases)

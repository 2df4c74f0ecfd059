"""One rank of several, its exchanges left out, and what its kernels take in a layer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.node import one_rank
from bench.node.measure import Options
from bench.rank import steps
from bench.rank.kernel_trace import Interval, KernelTrace
from bench.rank.model import MeasuredModel
from engine.config import EngineConfig
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.settings.device import Hardware, ResolvedEngineConfig, resolve
from tests.support.checkpoints import tiny_checkpoint


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, ep=2), Layout(dp=2, ep=2)], ids=str)
def test_a_rank_decodes_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    directory = tiny_checkpoint(tmp_path)

    def resolve_tiny(scratch: Path, options: Options, requests: list[int], gpus: int) -> ResolvedEngineConfig:
        assert gpus == 2
        parallel = ParallelConfig(tp=layout.tp, dp=layout.dp, ep=layout.ep)
        config = EngineConfig(
            model_dir=directory, device="cpu", threads=1, random_weights=True, parallel=parallel, max_requests=2,
            total_blocks=32, max_step_tokens=128,
        )  # fmt: skip
        return resolve(config, Hardware(0, 1 << 30))

    def trace(work: Callable[[], object]) -> KernelTrace:
        work()
        return KernelTrace([Interval("gemm", 0, 10)])

    monkeypatch.setattr(one_rank, "resolve_for", resolve_tiny)
    monkeypatch.setattr(one_rank, "trace_kernels", trace)
    monkeypatch.setattr(one_rank, "CONTEXT", 90)
    for name, value in (("WARM_STEPS", 1), ("TRACED_STEPS", 1)):
        monkeypatch.setattr(steps, name, value)
    options = Options(layout, MeasuredModel("", 2, ""), 0, 2, 128, 0.0, None)
    measured = list(one_rank.measure(options, [1, 2]))
    assert [count for count, _, _ in measured] == [1, 2]
    assert all(step_ms > 0 and trace.span == 10 for _, step_ms, trace in measured)


def test_a_layers_kernel_counts_from_the_end_before_it() -> None:
    """Two layers with experts between three attentions, of which the second is a step's last one."""
    layer = [("decode_pair", 0, 10, 0), ("gate", 9, 14, 0), ("few_rows", 14, 30, 1), ("w4a8_few_tokens_3", 13, 28, 0)]
    kernels = [
        (name, start + 40 * at, stop + 40 * at, stream) for at in range(3) for name, start, stop, stream in layer
    ]
    kernels.append(("_likeliest", 71, 75, 0))
    found = one_rank.layers_of(KernelTrace([Interval(*each) for each in kernels]))
    assert found == [[("gate", 4), ("w4a8_few_tokens_3", 14), ("few_rows", 2), ("decode_pair", 20)]]
    table = one_rank.layer_table(found * 2)
    assert table.title == "a layer with experts: 40.0 us, mean of 2" and table.row_count == 4


def test_dense_layers_are_left_out() -> None:
    kernels = [Interval("decode_single", 20.0 * at, 20.0 * at + 10) for at in range(3)]
    assert not one_rank.layers_of(KernelTrace([*kernels, Interval("few_rows_16_64", 10, 15)]))

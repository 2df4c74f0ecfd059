from pathlib import Path

import pytest
from rich.console import Console

from bench.mesh_overhead.__main__ import MeshRun, Options, Overhead, run, steady_gaps
from launcher.shipped_model import shipped_model
from loadgen.summary import Distribution


def options(**changes: int) -> Options:
    small = {"layers": 1, "streams": 2, "prompt_tokens": 16, "tokens": 96, "settle": 8, "repeats": 1, "seed": 0}
    return Options(model=shipped_model(), **(small | changes))


def gaps(mean: float) -> Distribution:
    return Distribution(mean=mean, p50=mean, p90=mean, p99=mean, max=mean)


def test_gaps_count_while_every_stream_decodes() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0, 5.0], [2.0, 3.0, 4.5, 7.0]
    assert steady_gaps([early, late], settle=1) == [2.0, 1.5]


def test_the_ratio_compares_with_the_engine_before_and_after() -> None:
    overhead = Overhead(options(), [gaps(10.0), gaps(12.0)], [MeshRun(gaps(11.55), {})])
    assert overhead.ratio == pytest.approx(1.05)


@pytest.mark.slow
@pytest.mark.check("bench")
async def test_engine_and_mesh_answer_the_same_requests(tmp_path: Path) -> None:
    overhead = await run(options(), tmp_path / "overhead.log", Console(quiet=True))
    assert len(overhead.engine) == 2
    (behind_mesh,) = overhead.mesh
    assert {"gateway", "decode-0", "client"} <= set(behind_mesh.cores)
    assert 0.2 < overhead.ratio < 5

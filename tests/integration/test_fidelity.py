"""The simulator against the mesh that it imitates: the same requests at the same times, on oracle workers.

`make check-fidelity` prints a table. Steps are long beside what two busy cores do to a process. One load comes after
the other, in the simulation as in the mesh: what workers measured and how long answers were is known from those before,
and the p99 of 150 requests is the second worst of them, which would else be one of a mesh that knows nothing yet.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.calibration.mesh import MeshUnderTest, costs_of_mesh
from bench.load.client import Target
from bench.load.options import LoadOptions
from bench.load.run import Plan, load, plan
from bench.load.summary import Objectives, Summary, summarize
from mesh.config import validate
from mesh.cost_file import save_costs
from mesh.costs import CostFile, CostModel
from sim.asked import Asked, with_length
from sim.fleet import FleetConfig
from sim.run import check_conserved
from sim.simulation import SimulatedMesh
from tests.support.process_mesh import VOCABULARY, oracle_settings, process_mesh

pytestmark = pytest.mark.check("fidelity")

STEP_MS, PREFILL_RATE, BLOCKS, REQUESTS = 100.0, 2000.0, 2048, 8
OBJECTIVES = Objectives(2000.0, 250.0)
TARGET = Target("oracle", VOCABULARY)
SECONDS = 30.0
ENGINE = {
    "oracle.step_ms": STEP_MS,
    "oracle.prefill_tokens_per_second": PREFILL_RATE,
    "total_blocks": BLOCKS,
    "max_requests": REQUESTS,
}
# From the end of one load's arrivals to the next load's first: the last answers end, and warm-up requests come, which
# are one after the other and take less than WARM_UP_SECONDS each.
PAUSE_SECONDS, WARM_UP_SECONDS = 12.0, 4.0
# Largest relative differences.
GOODPUT, MEDIAN, TAIL = 0.10, 0.10, 0.25


@dataclass(frozen=True)
class Load:
    options: dict[str, Any]
    # Requests a second, the last about what the fleet can do: with prefill workers, and without.
    pair_rates: tuple[float, ...]
    alone_rates: tuple[float, ...]


LOADS = (
    Load({"isl": 256, "osl": 16}, (4.0, 7.0, 9.5), (5.0, 8.5, 11.0)),
    Load(
        {"isl": 1024, "osl": 24, "prefixes": 4, "prefix_length": 512},
        (2.7, 4.7, 5.6),
        (2.9, 5.0, 6.8),
    ),
)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (0, 4)], ids=["2P2D", "4IFB"])
async def test_goodput_and_latencies_are_those_of_the_real_mesh(prefill: int, decode: int, tmp_path: Path) -> None:
    assumed = tmp_path / "assumed.json"
    save_costs(CostFile(CostModel(decode_steps=((1.0, STEP_MS),), prefill_tokens_per_second=PREFILL_RATE)), assumed)
    settings = (*oracle_settings(**ENGINE), f"scheduler.placement.costs={assumed}")
    async with process_mesh(workers=decode, prefill=prefill, settings=settings) as mesh:
        under_test = MeshUnderTest(mesh.grpc_endpoint, decode, widths=(1, 4, 8), prompts=(256, 512, 1024, 1536))
        measured = await costs_of_mesh(under_test, _say)
        calibrated = tmp_path / "calibrated.json"
        save_costs(measured, calibrated)
        _say(f"calibrated: {msgspec.json.encode(measured.costs).decode()}, error {measured.error}")
        options = [
            LoadOptions(
                grpc=mesh.grpc_endpoint,
                rate=rate,
                duration_s=SECONDS,
                vocabulary_size=VOCABULARY,
                seed=int(rate * 10),
                **load_.options,
                ttft_slo_ms=OBJECTIVES.ttft_ms,
                tpot_slo_ms=OBJECTIVES.tpot_ms,
            )
            for load_ in LOADS
            for rate in (load_.pair_rates if prefill else load_.alone_rates)
        ]
        real = [(await load(each)).summary for each in options]
    simulated = _simulated(_fleet(prefill, decode, assumed, calibrated), options)
    wrong = []
    for each, of_mesh, of_simulator in zip(options, real, simulated, strict=True):
        wrong += _compare(f"{prefill}P{decode}D {each.isl}/{each.osl} {each.rate:g}/s", of_mesh, of_simulator)
    assert not wrong


def _fleet(prefill: int, decode: int, assumed: Path, calibrated: Path) -> FleetConfig:
    group = {"max_requests": REQUESTS, "total_blocks": BLOCKS, "costs": calibrated}
    values = {
        "block_bytes": 512,
        "layers": 1,
        "prefill": {"replicas": prefill, **group},
        "decode": {"replicas": decode, **group},
        "scheduler": {"placement": {"costs": assumed}},
    }
    return validate(FleetConfig, values, "fleet")


def _simulated(fleet: FleetConfig, loads: Sequence[LoadOptions]) -> list[Summary]:
    """Of each load, of which each comes after the one before.

    Before the first comes one like it that does not count: the mesh has served the requests of its calibration.
    """
    mesh, asked, starts = SimulatedMesh(fleet, 0), list[Asked](), list[float]()
    calibration = loads[0].model_copy(update={"seed": len(loads)})
    for number, options in enumerate([calibration, *loads]):
        starts.append(PAUSE_SECONDS + number * (SECONDS + PAUSE_SECONDS))
        asked += _warm_up(options, starts[-1])
        asked += _asked(plan(options, TARGET), starts[-1])
    mesh.run(asked)
    check_conserved(mesh)
    ended = [live.record for live in mesh.ended]
    return [
        summarize([each for each in ended if start <= each.scheduled_s < start + SECONDS], OBJECTIVES)
        for start in starts[1:]
    ]


def _warm_up(options: LoadOptions, start: float) -> list[Asked]:
    """The requests that a load generator sends before it counts."""
    requests = plan(options.model_copy(update={"requests": options.warmup, "duration_s": None}), TARGET, seed_offset=1)
    times = [start - WARM_UP_SECONDS * left for left in range(options.warmup, 0, -1)]
    return _asked(Plan(requests.jobs, times), 0.0)


def _asked(requests: Plan, start: float) -> list[Asked]:
    asked = []
    for job, seconds in zip(requests.jobs, requests.times_s, strict=True):
        prompt = [token for token in job.prompt if isinstance(token, int)]
        asked.append(Asked(start + float(seconds), with_length(prompt, job.max_tokens), job.max_tokens, job.max_tokens))
    return asked


def _compare(name: str, real: Summary, simulated: Summary) -> list[str]:
    assert real.ttft_ms and real.tpot_ms and simulated.ttft_ms and simulated.tpot_ms
    rows = (
        ("goodput", real.goodput.requests_per_second, simulated.goodput.requests_per_second, GOODPUT),
        ("TTFT p50", real.ttft_ms.p50, simulated.ttft_ms.p50, MEDIAN),
        ("TPOT p50", real.tpot_ms.p50, simulated.tpot_ms.p50, MEDIAN),
        ("TTFT p99", real.ttft_ms.p99, simulated.ttft_ms.p99, TAIL),
        ("TPOT p99", real.tpot_ms.p99, simulated.tpot_ms.p99, TAIL),
    )
    _say(f"{name}: " + ", ".join(f"{what} {a:.2f} and {b:.2f} ({b / a - 1:+.0%})" for what, a, b, _ in rows))
    return [f"{name}: {what} {b / a - 1:+.1%}" for what, a, b, most in rows if abs(b / a - 1) > most]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

"""The simulator against the mesh that it imitates: the same requests at the same times, on oracle workers.

`make check-fidelity` prints a table. One load comes after the other, in the simulation as in the mesh. From the loads
before, workers have measurements and the scheduler knows how long answers are. Otherwise the p99 of 150 requests, which
is the second worst of them, would be that of a mesh that knows nothing yet.

If requests wait for each other, a load is run with several draws of its arrivals, and the means of their figures are
compared. A millisecond then decides on which of two workers a request is placed, and so which requests wait for it: one
draw says little (docs/fleet.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from msgspec.structs import replace

from loadgen.options import LoadOptions
from loadgen.plan import plan
from loadgen.run import load
from loadgen.summary import Objectives, Summary, summarize
from mesh.cost_file import load_costs, save_costs
from sim.asked import Asked
from sim.fleet import FleetConfig
from sim.run import check_conserved
from sim.simulation import SimulatedMesh
from tests.support.process_mesh import VOCABULARY
from tests.support.simulated_twin import (
    LONG,
    MOST,
    SHORT,
    TARGET,
    asked_of,
    assumed_costs,
    calibrated_costs,
    oracle_mesh,
    say,
    twin,
    warm_up,
)

pytestmark = pytest.mark.check("fidelity")

OBJECTIVES = Objectives(2000.0, 250.0)
SECONDS = 30.0
# PAUSE_SECONDS lie between one load's last arrival and the next load's first. In them the last answers end and warm-up
# requests come, which follow one another and take less than WARM_UP_SECONDS each.
PAUSE_SECONDS, WARM_UP_SECONDS = 12.0, 4.0
# Largest relative differences that are allowed.
WANTED = {"goodput": 0.10, "TTFT p50": 0.10, "TPOT p50": 0.10, "TTFT p99": 0.25, "TPOT p99": 0.25}
# Factors on the times of steps, which were calibrated on an idle mesh: steps differ by so much from one load to the
# next. Near saturation a tenth of a percent decides which requests wait for which. The mesh's figures must equal those
# of one of these twins or lie between them.
SLOWER = (1.0, 1.002, 1.004, 1.006, 1.008, 1.01)
# Draws of a load with more than half of the highest rate, and by what share their number of requests may differ from
# that of the rate. In thirty seconds, one draw in three is off by a tenth, which would be another load.
DRAWS, UNEVEN = 4, 0.02
# Lengths, and the rates below the highest one, by fleet, in requests a second.
LOADS: tuple[tuple[dict[str, Any], dict[tuple[int, int], tuple[float, ...]]], ...] = (
    (SHORT, {(2, 2): (4.0, 7.0), (0, 4): (5.0, 8.5)}),
    (LONG, {(2, 2): (2.7, 4.7), (0, 4): (2.9, 5.0)}),
)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (0, 4)], ids=["2P2D", "4IFB"])
async def test_goodput_and_latencies_are_those_of_the_real_mesh(prefill: int, decode: int, tmp_path: Path) -> None:
    assumed = assumed_costs(tmp_path / "assumed.json")
    async with oracle_mesh(prefill, decode, assumed) as mesh:
        calibrated = await calibrated_costs(mesh, decode, tmp_path / "calibrated.json")
        loads = _loads(mesh.grpc_endpoint, (prefill, decode))
        options = [each for draws in loads for each in draws]
        real = [(await load(each)).summary for each in options]
    twins = []
    for slower in SLOWER:
        costs = _slowed(calibrated, slower, tmp_path / "slowed.json")
        twins.append(_simulated(twin(prefill, decode, assumed, costs), options))
    wrong = []
    summaries = [iter(found) for found in (real, *twins)]
    for draws in loads:
        name = f"{prefill}P{decode}D {draws[0].isl}/{draws[0].osl} {draws[0].rate:g}/s"
        of_mesh, *of_twins = [_figures(list(islice(found, len(draws)))) for found in summaries]
        wrong += _compare(name, of_mesh, of_twins)
    assert not wrong


def _loads(endpoint: str, fleet: tuple[int, int]) -> list[list[LoadOptions]]:
    """The draws of each load."""
    return [
        list(islice(_draws(endpoint, rate, lengths), DRAWS if rate > most / 2 else 1))
        for (lengths, rates), most in zip(LOADS, MOST[fleet], strict=True)
        for rate in (*rates[fleet], most)
    ]


def _draws(endpoint: str, rate: float, lengths: Mapping[str, Any]) -> Iterator[LoadOptions]:
    """Endless draws of a load that have about as many requests as the rate says."""
    for seed in count(int(rate * 10)):
        options = LoadOptions(
            grpc=endpoint,
            rate=rate,
            duration_s=SECONDS,
            vocabulary_size=VOCABULARY,
            seed=seed,
            **lengths,
            ttft_slo_ms=OBJECTIVES.ttft_ms,
            tpot_slo_ms=OBJECTIVES.tpot_ms,
        )
        if abs(len(plan(options, TARGET).jobs) / (rate * SECONDS) - 1) <= UNEVEN:
            yield options


def _slowed(calibrated: Path, slower: float, path: Path) -> Path:
    measured = load_costs(calibrated)
    steps = tuple((requests, ms * slower) for requests, ms in measured.costs.decode_steps)
    save_costs(replace(measured, costs=replace(measured.costs, decode_steps=steps)), path)
    return path


def _simulated(fleet: FleetConfig, loads: Sequence[LoadOptions]) -> list[Summary]:
    """Simulate the loads one after the other; returns the summary of each.

    A load like the first one comes before it and does not count, because the mesh has served its calibration's
    requests.
    """
    mesh, asked, starts = SimulatedMesh(fleet, 0), list[Asked](), list[float]()
    calibration = loads[0].model_copy(update={"seed": len(loads)})
    for number, options in enumerate([calibration, *loads]):
        starts.append(PAUSE_SECONDS + number * (SECONDS + PAUSE_SECONDS))
        asked += warm_up(options, starts[-1], WARM_UP_SECONDS)
        asked += asked_of(plan(options, TARGET), starts[-1])
    mesh.run(asked)
    check_conserved(mesh)
    ended = [live.record for live in mesh.ended]
    return [
        summarize([each for each in ended if start <= each.scheduled_s < start + SECONDS], OBJECTIVES)
        for start in starts[1:]
    ]


def _compare(name: str, real: Mapping[str, float], twins: Sequence[Mapping[str, float]]) -> list[str]:
    wrong = []
    said = []
    for what, most in WANTED.items():
        was, found = real[what], sorted(each[what] for each in twins)
        # The relative difference between the mesh and the nearest value in the range of the twins.
        off = min(max(was, found[0]), found[-1]) / was - 1
        said.append(f"{what} {was:.2f} and {found[0]:.2f} to {found[-1]:.2f} ({off:+.0%})")
        wrong += [f"{name}: {what} {off:+.1%}"] if abs(off) > most else []
    say(f"{name}: " + ", ".join(said))
    return wrong


def _figures(draws: Sequence[Summary]) -> dict[str, float]:
    """Means over the draws of a load."""
    found = [_figures_of(each) for each in draws]
    return {what: mean(each[what] for each in found) for what in WANTED}


def _figures_of(draw: Summary) -> dict[str, float]:
    assert draw.ttft_ms and draw.tpot_ms
    return {
        "goodput": draw.goodput.requests_per_second,
        "TTFT p50": draw.ttft_ms.p50,
        "TPOT p50": draw.tpot_ms.p50,
        "TTFT p99": draw.ttft_ms.p99,
        "TPOT p99": draw.tpot_ms.p99,
    }

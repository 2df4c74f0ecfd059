"""A real mesh of oracle workers, and a simulated fleet that should behave like it.

Steps are long compared with the delays of a process on two busy cores.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from capacity.calibration.mesh import MeshUnderTest, costs_of_mesh
from loadgen.client import Target
from loadgen.options import LoadOptions
from loadgen.plan import Plan, plan
from mesh.config_values import validate
from mesh.cost_file import CostFile, save_costs
from mesh.costs import CostModel
from sim.asked import Asked, with_length
from sim.fleet import FleetConfig
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh

STEP_MS, PREFILL_RATE, BLOCKS, REQUESTS = 100.0, 2000.0, 2048, 8
TARGET = Target("oracle", VOCABULARY)
SHORT: dict[str, Any] = {"isl": 256, "osl": 16}
LONG: dict[str, Any] = {"isl": 1024, "osl": 24, "prefixes": 4, "prefix_length": 512}
# By (prefill, decode) workers: requests a second with short and with long prompts, about the most that the fleet
# serves.
MOST = {(2, 2): (9.5, 5.6), (0, 4): (11.0, 6.8)}
_ENGINE = {
    "oracle.step_ms": STEP_MS,
    "oracle.prefill_tokens_per_second": PREFILL_RATE,
    "total_blocks": BLOCKS,
    "max_requests": REQUESTS,
}


def assumed_costs(path: Path) -> Path:
    """Write a cost file from the oracle's settings alone, without any measurement."""
    save_costs(CostFile(CostModel(decode_steps=((1.0, STEP_MS),), prefill_tokens_per_second=PREFILL_RATE)), path)
    return path


@asynccontextmanager
async def oracle_mesh(prefill: int, decode: int, costs: Path) -> AsyncIterator[ProcessMesh]:
    """costs: the scheduler's cost file."""
    settings = (*oracle_settings(**_ENGINE), f"scheduler.placement.costs={costs}")
    async with process_mesh(workers=decode, prefill=prefill, settings=settings) as mesh:
        yield mesh


async def calibrated_costs(mesh: ProcessMesh, decode: int, path: Path) -> Path:
    under_test = MeshUnderTest(mesh.grpc_endpoint, decode, widths=(1, 4, 8), prompts=(256, 512, 1024, 1536))
    measured = await costs_of_mesh(under_test, say)
    save_costs(measured, path)
    say(f"calibrated: {msgspec.json.encode(measured.costs).decode()}, error {measured.error}")
    return path


def twin(prefill: int, decode: int, scheduler_costs: Path, worker_costs: Path) -> FleetConfig:
    group = {"max_requests": REQUESTS, "total_blocks": BLOCKS, "costs": worker_costs}
    values = {
        "block_bytes": 512,
        "layers": 1,
        "prefill": {"replicas": prefill, **group},
        "decode": {"replicas": decode, **group},
        "scheduler": {"placement": {"costs": scheduler_costs}},
    }
    return validate(FleetConfig, values, "fleet")


def asked_of(requests: Plan, start: float) -> list[Asked]:
    """The requests of a load that begins at `start`, for the simulator."""
    asked = []
    for job, seconds in zip(requests.jobs, requests.times_s, strict=True):
        prompt = [token for token in job.prompt if isinstance(token, int)]
        asked.append(Asked(start + float(seconds), with_length(prompt, job.max_tokens), job.max_tokens, job.max_tokens))
    return asked


def warm_up(options: LoadOptions, start: float, seconds_each: float) -> list[Asked]:
    """The warm-up requests that a load generator sends one after the other before it counts."""
    requests = plan(options.model_copy(update={"requests": options.warmup, "duration_s": None}), TARGET, seed_offset=1)
    times = [start - seconds_each * left for left in range(options.warmup, 0, -1)]
    return asked_of(Plan(requests.jobs, times), 0.0)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

"""What each policy is worth: `python -m bench.fleet.policies` simulates the same requests with it and without.

The fleet is eight H200 with DeepSeek-R1, half of them for prompts unless a case says otherwise (see
`bench.fleet.goodput`).
Each policy is tried where it could matter, with the same requests both times, for several seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from bench.fleet.goodput import OUTPUT, PROMPT, TTFT_MS, Case, Engines, fleet_of
from capacity.shapes import DEEPSEEK_R1
from engine.model.config import parse_model_config
from loadgen.records import RequestRecord
from loadgen.summary import Objectives, is_good
from mesh.config import Config
from mesh.config_values import validate
from scheduler.config import ObjectivesConfig
from sim.asked import SyntheticWorkload
from sim.fleet import FleetConfig
from sim.run import check_conserved, rare_collections
from sim.simulation import SimulatedMesh
from sim.workload import WorkloadConfig

TPOT_MS = 50.0
OBJECTIVES = Objectives(TTFT_MS, TPOT_MS)
# Seconds of arrivals that count. Requests arrive for as long before and do not count, because the fleet begins empty.
SECONDS = 60.0


@dataclass(frozen=True)
class Policy:
    """`off`: the settings that switch it off. `fleet`, `workload`: what else differs from eight H200 and `REQUESTS`."""

    name: str
    where: str
    off: Mapping[str, object]
    per_second: float
    workload: Mapping[str, Any] = field(default_factory=dict)
    fleet: Mapping[str, object] = field(default_factory=dict)
    prefill: int = 4
    # Whose requests are counted; None counts all.
    tenant: str | None = None


REQUESTS = {
    "prompt": {"mean": PROMPT, "kind": "lognormal", "spread": 0.5},
    "output": {"mean": OUTPUT, "kind": "lognormal", "spread": 0.5, "most": 4000},
    "max_tokens": 4000,
}
CHATS = {"prompt": {"mean": 40}, "output": {"mean": 400, "kind": "lognormal"}, "turns": 8, "think_seconds": 2.0}
REFUSAL = "refusal"
POLICIES = (
    Policy(REFUSAL, "10 requests/s, about saturation", {"scheduler.objectives": ObjectivesConfig()}, 10.0),
    Policy(REFUSAL, "12 requests/s, far above", {"scheduler.objectives": ObjectivesConfig()}, 12.0),
    Policy(
        "slots left at mean output length",
        "5P3D with 40 places each, 3.4 requests/s",
        {"scheduler.assumed_output": "most"},
        3.4,
        fleet={"decode.max_requests": 40, "decode.total_blocks": 3200},
        prefill=5,
    ),
    Policy(
        "prefix weighing",
        "11 requests/s, 400 prefixes of 2,048 tokens",
        {"scheduler.hints": False},
        11.0,
        {"prefixes": 400, "prefix_tokens": 2048},
    ),
    Policy(
        "short prompts on decode workers",
        "chats of 8 turns of 40 tokens, 6 a second",
        {"scheduler.placement.short_prompt_tokens": 0},
        6.0,
        CHATS,
        {"decode.can_prefill": True},
    ),
    Policy(
        "shortest prompt first",
        "7 requests/s, long-tailed prompts",
        {"shortest_first": False},
        7.0,
        {"prompt": {"mean": PROMPT, "kind": "lognormal", "spread": 1.2, "most": 60_000}},
    ),
    Policy(
        "fairness",
        "a tenant with a tenth of 12 requests/s",
        {"fair": False},
        12.0,
        {"tenants": [{"name": "busy", "share": 9}, {"name": "quiet", "share": 1}]},
        tenant="quiet",
    ),
)


def ran(policy: Policy, on: bool, seed: int, seconds: float, folder: Path) -> dict[int, RequestRecord]:
    """The counted requests by their numbers. A request has the same number with the policy and without."""
    case = Case(
        "", parse_model_config(dict(DEEPSEEK_R1)), 2, Engines(8 - policy.prefill, 8), Engines(policy.prefill, 8)
    )
    fleet = changed(fleet_of(case, TPOT_MS, folder), policy.fleet if on else {**policy.fleet, **policy.off})
    values = {
        **REQUESTS,
        **policy.workload,
        "arrivals": {"per_second": policy.per_second},
        "seconds": 2 * seconds,
        "seed": seed,
    }
    mesh = SimulatedMesh(fleet, seed)
    with rare_collections():
        mesh.run(SyntheticWorkload(validate(WorkloadConfig, values, "workload")))
    check_conserved(mesh)
    return {
        live.number: live.record
        for live in mesh.ended
        if live.record.scheduled_s >= seconds and policy.tenant in (None, live.tenant)
    }


def kept(records: Mapping[int, RequestRecord]) -> float:
    """The share of the requests that kept 2 s and 50 ms."""
    return mean(is_good(each, OBJECTIVES) for each in records.values())


def refused(on: Sequence[Mapping[int, RequestRecord]], off: Sequence[Mapping[int, RequestRecord]]) -> str:
    """A sentence: how many of the requests that the policy refuses miss an objective without the policy."""
    there = [without[number] for records, without in zip(on, off, strict=True) for number in _refused(records)]
    missed = sum(not is_good(each, OBJECTIVES) for each in there)
    return f"{missed} of {len(there)} that were refused missed an objective where none was"


def _refused(records: Mapping[int, RequestRecord]) -> list[int]:
    return [number for number, record in records.items() if record.error is not None]


def changed(fleet: FleetConfig, settings: Mapping[str, object]) -> FleetConfig:
    """The fleet with other settings, given by dotted names."""
    for name, value in settings.items():
        fleet = _with(fleet, name, value)
    return fleet


def _with(config: Any, name: str, value: object) -> Any:
    key, _, rest = name.partition(".")
    assert isinstance(config, Config) and hasattr(config, key)
    return config.model_copy(update={key: _with(getattr(config, key), rest, value) if rest else value})


def line(policy: Policy, on: Sequence[float], off: Sequence[float]) -> str:
    """A row of the table. Its last cell is the mean gain in percentage points and that mean's standard error."""
    points = [100 * (each_on - each_off) for each_on, each_off in zip(on, off, strict=True)]
    error = stdev(points) / len(points) ** 0.5 if len(points) > 1 else 0.0
    return (
        f"| {policy.name} | {policy.where} | {100 * mean(on):.1f}% | {100 * mean(off):.1f}% "
        f"| {mean(points):+.1f} ± {error:.1f} |"
    )


def main(
    seeds: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="How often each comparison is simulated, each time with other requests."),
    ] = 5,
    seconds: Annotated[
        float,
        typer.Option(metavar="S", help="How long counted requests arrive in each simulation, after as long a warm-up."),
    ] = SECONDS,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Compare only policies whose name contains this; by default all.")
    ] = "",
) -> None:
    """Find out what each policy of scheduling and placement is worth: simulate the same requests with it and without.
    The fleet is eight H200 that serve DeepSeek-R1; no GPU is needed. A row of the table that is printed has a policy,
    the load under which it was tried, and the share of requests that kept their bounds (2 s to the first token, 50 ms
    for each other) with the policy, without it, and the difference with its standard error.
    """
    refusals = list[str]()
    typer.echo("| policy | where | with | without | points |\n|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for policy in POLICIES:
            if only in policy.name:
                on, off = (
                    [ran(policy, each, seed, seconds, Path(folder)) for seed in range(seeds)] for each in (True, False)
                )
                typer.echo(line(policy, [*map(kept, on)], [*map(kept, off)]))
                if policy.name == REFUSAL:
                    refusals.append(f"{policy.where}: {refused(on, off)}")
    typer.echo("\n" + "\n".join(refusals))


if __name__ == "__main__":
    typer.run(main)

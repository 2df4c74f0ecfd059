"""Predicts, without a GPU, how well two, four or eight GPUs serve DeepSeek-R1, divided into workers in different ways.

`python -m bench.fleet.disaggregation` simulates the meshes that `bench.node.disaggregation` measures on real GPUs,
with the same requests at the same times. It prints a line for each mesh and rate: which share of the requests was
good, and the times that they took. A request is good if its first token came within 2 s and its others kept the bound
of --tpot.

The meshes:

ifb one worker of all GPUs, which computes prompts together with the tokens of other requests aligned ifb the same, and
prompts wait for each other, so that all GPUs compute prompts in the same steps divided ifb the same as ifb, and all
GPUs compute a part of each prompt pd two workers of half of the GPUs: one for prompts, one for tokens

Engines, placement and the choice of a GPU are the product's own code. Only the time of a step is predicted, from
measurements (bench/node/measured) that are scaled to the number of layers. docs/fleet.md says how well that works.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import typer

import bench.node
from bench.node.disaggregation import Measured
from bench.node.served_meshes import MESHES, RANGE_RATIO, TPOT_MS, TTFT_MS, Options, load_options, settings_of
from capacity.shapes import DEEPSEEK_R1
from engine.config import EngineConfig
from engine.pace.tails import most_rows
from loadgen.client import Target
from loadgen.plan import plan
from loadgen.summary import Objectives
from loadgen.traces import TraceRow
from mesh.blocks import BLOCK_TOKENS
from mesh.config_values import validate
from mesh.cost_file import CostFile, load_costs, save_costs
from mesh.costs import CostModel
from sim.fleet import FleetConfig
from sim.run import simulate
from sim.workload import WorkloadConfig

WHOLE = int(DEEPSEEK_R1["num_hidden_layers"])
DENSE = int(DEEPSEEK_R1["first_k_dense_replace"])
# By the number of a worker's ranks: the cost file, and the number of layers that it was measured with.
MEASURED = {
    2: ("dp2-ep2-11-layers.json", 11),
    4: ("dp4-ep4-61-layers.json", WHOLE),
    8: ("dp8-ep8-61-layers.json", WHOLE),
}
# The part of a step of four ranks that does not grow with the layers that have experts, as a share of a step with all
# 61 layers: 64 requests took 35.43 ms with 61 layers and 4.91 ms with 9. FIXED_TOKEN_MS is the same part of one prompt
# token's time (without context) in milliseconds: prompts of 3,500 tokens were computed at 7,997 tokens/s with 61 layers
# and at 59,549 tokens/s with 9, in steps of 8,192.
FIXED_SHARE = 0.0392
FIXED_TOKEN_MS = 0.0035
# Bytes of one token's FP8 latent in one layer.
KV_BYTES = 576
DEFAULTS = EngineConfig(backend="oracle")
# Keys that --set can change here, each with the pattern of its values.
INTEGER, NUMBER, SHARE = r"\d+", r"\d+(\.\d+)?", r"0?\.\d*[1-9]\d*"
SIMULATED_KEYS = {
    "max_requests": INTEGER,
    "max_step_tokens": INTEGER,
    "mixed_step_ms": NUMBER + "|auto|null",
    "prompt_share": SHARE,
    "parallel.prompt_wait_steps": INTEGER,
    "parallel.context_parallel_tokens": INTEGER + "|auto|null",
}


@dataclass(frozen=True)
class Counted:
    """Which requests count and which of them are good. `tpot_ms` is the bound for all of R1's layers; with fewer layers
    it shrinks in proportion. Requests of the first and of the last seconds do not count.
    """

    tpot_ms: float = TPOT_MS
    warm_up_seconds: float = 0.0
    cool_down_seconds: float = 0.0


def wrong_setting(settings: Sequence[str]) -> str | None:
    """The first setting whose key is not simulated or whose value does not match its key's pattern; None if all are
    right.
    """
    known = {f"{role}.engine.{key}": kind for role in ("prefill", "decode") for key, kind in SIMULATED_KEYS.items()}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known or not re.fullmatch(known[key], value):
            return setting
    return None


def costs_of(ranks: int, layers: int) -> CostModel:
    """What work costs one rank of a worker of `ranks` ranks that runs the first `layers` layers of R1."""
    measured, depth = _measured(ranks)
    whole, _ = _measured(4)
    part = (layers - DENSE) / (depth - DENSE)
    steps = []
    for requests, ms in measured.decode_steps:
        fixed = FIXED_SHARE * whole.decode_ms(requests)
        steps.append((requests, fixed + (ms - fixed) * part))
    token_ms = FIXED_TOKEN_MS + (1000 / measured.prefill_tokens_per_second - FIXED_TOKEN_MS) * part
    return msgspec.structs.replace(
        measured,
        decode_steps=tuple(steps),
        decode_context_ms=measured.decode_context_ms * layers / depth,
        prefill_tokens_per_second=1000 / token_ms,
        prefill_pairs_ms=measured.prefill_pairs_ms * layers / depth,
        prefill_step_ms=measured.prefill_step_ms * layers / depth,
        launch_ms=measured.launch_ms * layers / depth,
        captured_launch_ms=measured.captured_launch_ms * layers / depth,
    )


def fleet_of(mesh: str, options: Options, folder: Path) -> FleetConfig:
    """The mesh with the settings that bench.node starts it with. Every request finds its blocks: memory is no limit."""
    given = dict(setting.split("=", 1) for setting in settings_of(mesh, options))
    roles = ("prefill", "decode") if mesh == "pd" else ("decode",)
    groups = {role: _group(given, role, options, folder / f"{role}.json") for role in roles}
    return validate(
        FleetConfig,
        {
            "costs": folder / "decode.json",
            "block_bytes": BLOCK_TOKENS * KV_BYTES * options.layers,
            "layers": options.layers,
            **groups,
        },
        "fleet",
    )


def predict(mesh: str, rate: float, options: Options, counted: Counted, number: int = 0) -> Measured:
    """number: index of this load among those of the mesh, which picks its requests."""
    bound = counted.tpot_ms * options.layers / WHOLE
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = _rows(rate, options, number)
        (folder / "requests.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
        workload = {
            "trace": folder / "requests.jsonl",
            "seconds": options.seconds,
            "warm_up_seconds": counted.warm_up_seconds,
            "cool_down_seconds": counted.cool_down_seconds,
        }
        result = simulate(
            fleet_of(mesh, options, folder),
            validate(WorkloadConfig, workload, "workload"),
            Objectives(TTFT_MS, bound),
        )
    return Measured(mesh, rate, result.summary)


def lines(found: Sequence[Measured]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| mesh | requests/s | good | good/s | TTFT p50, p99, ms | TPOT p50, p99, ms | ITL p50, p99, max, ms |"
    yield "|---|---|---|---|---|---|---|"
    for each in found:
        summary = each.summary
        ttft, tpot, itl = summary.ttft_ms, summary.tpot_ms, summary.itl_ms
        assert ttft is not None and tpot is not None and itl is not None
        yield (
            f"| {each.mesh} | {each.rate:g} | {summary.goodput.share:.1%} | {summary.goodput.requests_per_second:.2f} "
            f"| {ttft.p50:,.0f}, {ttft.p99:,.0f} | {tpot.p50:.1f}, {tpot.p99:.1f} "
            f"| {itl.p50:.1f}, {itl.p99:.1f}, {itl.max:.1f} |"
        )


def _measured(ranks: int) -> tuple[CostModel, int]:
    """The costs measured on a worker of this many ranks, and the number of layers that they were measured with."""
    name, layers = MEASURED[ranks]
    return load_costs(Path(bench.node.__file__).with_name("measured") / name).costs, layers


def _group(given: dict[str, str], role: str, options: Options, costs: Path) -> dict[str, object]:
    engine = {key.removeprefix(f"{role}.engine."): value for key, value in given.items()}
    ranks, requests = int(engine["parallel.dp"]), int(engine["max_requests"])
    step_tokens = int(engine.get("max_step_tokens", DEFAULTS.max_step_tokens))
    save_costs(CostFile(costs_of(ranks, options.layers)), costs)
    longest = int((options.isl + options.osl) * (1 + RANGE_RATIO))
    return {
        "replicas": 1,
        "ranks": ranks,
        "costs": costs,
        **{
            key.rpartition(".")[2]: None if engine[key] == "null" else engine[key]
            for key in SIMULATED_KEYS
            if key in engine
        },
        "captured_rows": most_rows(requests, step_tokens),
        "captured_prompt_tokens": DEFAULTS.prompt_graph_tokens,
        "total_blocks": requests * (longest // BLOCK_TOKENS + 2),
        "max_step_tokens": step_tokens,
    }


def _rows(rate: float, options: Options, number: int) -> list[TraceRow]:
    """The requests that bench.node.disaggregation sends."""
    planned = plan(load_options("", options, rate, number), Target("", int(DEEPSEEK_R1["vocab_size"])))
    return [
        TraceRow(1000 * seconds, len(job.prompt), job.max_tokens)
        for seconds, job in zip(planned.times_s, planned.jobs, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet.disaggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def option(name: str, metavar: str, meaning: str, **more: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=f"{meaning} (default: %(default)s)", **more)

    parser.add_argument("--gpus", type=int, choices=sorted(MEASURED), default=4, help="GPUs of the mesh (default: 4)")
    option(
        "--rates",
        "RATE",
        "requests a second; each rate is simulated by itself",
        type=float,
        nargs="+",
        default=[4.0, 7.0],
    )
    option("--seconds", "S", "how long requests arrive, at each rate", type=float, default=20.0)
    option("--warm-up", "S", "do not count requests that arrive in the first S seconds", type=float, default=0.0)
    option("--cool-down", "S", "do not count requests that arrive in the last S seconds", type=float, default=0.0)
    option("--isl", "N", "tokens of a prompt on average; they vary by 30%%", type=int, default=3500)
    option("--osl", "N", "tokens of an answer on average; they vary by 30%%", type=int, default=500)
    option("--layers", "N", f"layers of the model; all of DeepSeek-R1 are {WHOLE}", type=int, default=30)
    option(
        "--tpot", "MS", f"longest time per token of a good request with {WHOLE} layers; fewer have less in proportion",
        type=float, default=TPOT_MS,
    )  # fmt: skip
    option("--max-requests", "N", "most requests that a GPU serves at once", type=int, default=128)
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="SERVICE.KEY=VALUE",
        help="a setting of prefill.engine or decode.engine, as for `deepmesh up`; may be repeated. Simulated are "
        + ", ".join(SIMULATED_KEYS),
    )  # fmt: skip
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=MESHES, help="which meshes (default: all)")
    given = parser.parse_args()
    wrong = wrong_setting(given.settings)
    if wrong is not None:
        keys = ", ".join(SIMULATED_KEYS)
        parser.error(f"--set {wrong}: numbers of {keys} are simulated, of prefill.engine and decode.engine")
    options = Options(
        tuple(given.rates), given.seconds, given.isl, given.osl, given.layers, None, given.max_requests,
        given.gpus, tuple(given.meshes), tuple(given.settings),
    )  # fmt: skip
    counted = Counted(given.tpot, given.warm_up, given.cool_down)
    found = [
        predict(mesh, rate, options, counted, number)
        for mesh in options.meshes
        for number, rate in enumerate(options.rates)
    ]
    for line in lines(found):
        typer.echo(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

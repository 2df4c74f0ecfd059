"""One rank of a published model on one GPU, against the floor of its bytes and FLOPs.

`python -m bench.rank [--shape r1-ep8-rank|v32-ep8-rank|moonlight|glm-flash|v2-lite] [--layers N] [--kv bf16|fp8]
[--prompts bf16|fp8] [--experts fp8|w4a8|nvfp4|bf16] [--query-weights published|fp8] [--requests 1 8 32 64 96]
[--context 3500] [--step-tokens 16384 2048] [--power] [--out DIR] [--growth STEPS]
[--next-n N|auto [--acceptance A,B,C ...]]`

By default it is a rank of DeepSeek-R1 with expert parallelism of eight; the other shapes are whole models. The real
engine runs over random FP8 weights, with each token's experts drawn uniformly at random; communication is left out.
With --experts w4a8 routed experts are in INT4. With nvfp4 routed experts, shared experts and dense layers are in
NVFP4, and attention is in bfloat16. With bf16 all weights are. With --query-weights fp8 queries' projections that would
be in bfloat16 are in FP8; the floor counts their published bytes. DIR gets rank.json and rank.png.

With --power it measures what copies, reads and products take of the card's power, alone and in turns, and prints the
mean power of steps and the least time in which the energy of their bytes and products fits the card's limit.

With --next-n it compares steps with drafts (one MTP module) and steps without. As many drafts are accepted as
--acceptance says: the share of rows whose first draft is right, whose first and second are, and so on. "Drafting" is
all that a step computes after its draws (verification, draft layers, heads, guesses). Its overhead is the time of one
guess, with the time of one of the model's layers and the head in the same step as the unit. DIR gets drafts.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.rank.acceptance import ACCEPTANCE, parse_next_n, parse_shares
from bench.rank.draft_overhead import DraftOverhead
from bench.rank.drafts import DraftBench, Drafted
from bench.rank.measure import STEP_TOKENS, Decode, RankBench, Report
from bench.rank.model import MeasuredModel
from bench.rank.plot import save
from bench.rank.power import Load
from bench.rank.steps import CONTEXT
from capacity.shapes import EXPERTS, SHAPES

LARGEST_GROUPS = 12


def decode_table(report: Report) -> Table:
    form = f"{report.experts} experts, {report.kv} KV, {report.context:,} tokens before"
    table = Table(title=f"{report.shape}, {report.layers} layers, {form}, on one {report.device}: decode")
    for column in ("requests", "step ms", "tokens/s", "floor ms", "ratio", "sustained floor ms", "ratio", "idle"):
        table.add_column(column, justify="right")
    for row in report.decode:
        cells = (f"{row.step_ms:.2f}", f"{row.tokens_per_second:,.0f}", f"{row.floor_ms:.2f}", f"{row.ratio:.2f}")
        sustained = (f"{row.sustained_floor_ms:.2f}", f"{row.sustained_ratio:.2f}")
        table.add_row(str(row.requests), *cells, *sustained, f"{row.idle_share:.1%}")
    return table


def power_table(rows: Sequence[Decode]) -> Table:
    table = Table(title="energy of steps")
    for column in ("requests", "W", "J a step", "ms at the power limit, at least", "step's ratio to that"):
        table.add_column(column, justify="right")
    for row in rows:
        assert row.watts is not None and row.power_floor_ms is not None
        energy = f"{row.watts:.0f}", f"{row.watts * row.step_ms / 1000:.3f}"
        table.add_row(
            str(row.requests), *energy, f"{row.power_floor_ms:.3f}", f"{row.step_ms / row.power_floor_ms:.3f}"
        )
    return table


def loads_table(loads: Sequence[Load]) -> Table:
    table = Table(title="what copies, reads and products take")
    for column in ("loads", "ms", "W", "TB/s read", "written", "fp8 TFLOP/s", "bf16"):
        table.add_column(column, justify="right")
    for load in loads:
        totals = load.read_bytes, load.written_bytes, load.fp8_flops, load.bf16_flops
        rates = [f"{total / load.seconds / 1e12:.2f}" if total else "" for total in totals]
        table.add_row(load.name, f"{load.seconds * 1000:.3f}", f"{load.watts:.0f}", *rates)
    return table


def breakdown_table(report: Report) -> Table:
    """Milliseconds of the largest groups of kernels, in a step and in the traced prompts."""
    names = dict.fromkeys(name for row in report.decode for name in list(row.breakdown)[:LARGEST_GROUPS])
    if report.prefill is not None:
        names |= dict.fromkeys(list(report.prefill.breakdown)[:LARGEST_GROUPS])
    table = Table("ms on the device", title="by kernel")
    for row in report.decode:
        table.add_column(str(row.requests), justify="right")
    table.add_column("prefill", justify="right")
    for name in names:
        prefill = report.prefill.breakdown.get(name, 0.0) if report.prefill is not None else 0.0
        table.add_row(name, *(f"{row.breakdown.get(name, 0) / 1000:.3f}" for row in report.decode), f"{prefill:.1f}")
    return table


def _progress(console: Console, row: Decode) -> None:
    console.print(f"{row.requests} requests: {row.step_ms:.2f} ms a step, {row.ratio:.2f} of the floor")


def drafts_table(without: Sequence[Drafted], drafted: Sequence[Drafted]) -> Table:
    table = Table(title="decode with drafts, tokens/s against none")
    columns = ("requests", "drafts", "accepted", "step ms", "tokens a row", "tokens/s", "against none")
    for column in (*columns, "floor ms", "ratio", "sustained", "ratio", "idle"):
        table.add_column(column, justify="right")
    plain = {row.requests: row.tokens_per_second for row in without}
    for row in (*without, *drafted):
        speed = (f"{row.tokens:.2f}", f"{row.tokens_per_second:,.0f}")
        against = f"{row.tokens_per_second / plain[row.requests]:.2f}"
        accepted = " ".join(map(str, row.acceptance))
        floors = [
            f"{value:.2f}" for floor in (row.floor_ms, row.sustained_floor_ms) for value in (floor, row.step_ms / floor)
        ]
        cells = (str(row.requests), f"{row.drafts:.1f}", accepted, f"{row.step_ms:.2f}", *speed, against, *floors)
        table.add_row(*cells, f"{row.idle_share:.1%}")
    return table


def overhead_table(overheads: Sequence[DraftOverhead]) -> Table:
    table = Table(title="drafting, us a step")
    for column in ("requests", "drafts", "drafting", "a layer", "head", "overhead", "floor", "ratio"):
        table.add_column(column, justify="right")
    for each in overheads:
        times = (f"{value:.1f}" for value in (each.drafting_us, each.layer_us, each.head_us))
        floor = (f"{each.floor_us:.1f}", f"{each.drafting_us / each.floor_us:.2f}")
        table.add_row(str(each.requests), str(each.drafts), *times, f"{each.ratio:.2f}", *floor)
    return table


def _drafts(arguments: argparse.Namespace, measured: MeasuredModel, console: Console) -> None:
    bench = DraftBench(measured, sorted(set(arguments.requests)))
    without = bench.without_drafts(arguments.steps)
    console.print(drafts_table(without, ()))
    drafted = bench.with_drafts(arguments.next_n, arguments.acceptance, arguments.steps)
    console.print(drafts_table(without, drafted))
    console.print(overhead_table(bench.overheads))
    if bench.step_times is not None:
        for rows, seconds in zip(bench.step_times.rows, bench.step_times.seconds, strict=True):
            console.print(f"{rows} rows, ms by depth: {' '.join(f'{1000 * each:.2f}' for each in seconds)}")
    console.print(f"ceilings: {bench.ceilings}; sustained: {bench.sustained}")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        steps, overheads = [asdict(row) for row in (*without, *drafted)], [asdict(row) for row in bench.overheads]
        (arguments.out / "drafts.json").write_text(
            json.dumps({"steps": steps, "overheads": overheads}, indent=2) + "\n", encoding="utf-8"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="r1-ep8-rank")
    parser.add_argument("--layers", type=int, help="by default those of the shape")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--prompts", choices=("bf16", "fp8"), default="bf16", help="in which they attend")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="fp8")
    parser.add_argument("--query-weights", choices=("published", "fp8"), default="published", help="with nvfp4 or bf16")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 96])
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before those that are decoded")
    parser.add_argument("--steps", type=int, default=40, help="decode steps timed for each number")
    parser.add_argument("--no-prefill", action="store_true", help="leave out the prompts")
    parser.add_argument(
        "--step-tokens", type=int, nargs="+", default=[STEP_TOKENS], help="the most of a step of prompts"
    )
    parser.add_argument("--power", action="store_true", help="measure power, of steps and of what they consist of")
    parser.add_argument("--growth", type=int, metavar="STEPS", help="only what this many steps leave in memory")
    parser.add_argument("--next-n", type=parse_next_n, help="drafts, or auto: against steps without")
    parser.add_argument("--acceptance", type=parse_shares, nargs="+", default=ACCEPTANCE)
    parser.add_argument("--out", type=Path, help="a directory for rank.json and rank.png")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a rank is measured on a CUDA device, and there is none here")
    console = Console(width=140)
    layers = arguments.layers or SHAPES[arguments.shape]["num_hidden_layers"]
    measured = MeasuredModel(
        arguments.shape, layers, arguments.experts, arguments.kv, arguments.prompts, arguments.query_weights
    )
    if arguments.next_n:
        _drafts(arguments, measured, console)
        return 0
    step_tokens = arguments.step_tokens
    bench = RankBench(measured, arguments.requests, arguments.context, max(step_tokens), power=arguments.power)
    if arguments.growth:
        console.print(bench.growth(arguments.growth))
        return 0
    decode = []
    for requests in arguments.requests:
        decode.append(bench.decode(requests, arguments.steps))
        _progress(console, decode[-1])
    prefills = [] if arguments.no_prefill else [bench.prefill(tokens) for tokens in step_tokens]
    report = bench.report(decode, prefills[0] if prefills else None)
    console.print(breakdown_table(report))
    console.print(decode_table(report))
    if bench.power is not None:
        console.print(loads_table(bench.loads))
        console.print(power_table(decode))
        console.print(f"power: {bench.power}")
    for prefill in prefills:
        console.print(
            f"prefill: {prefill.tokens_per_second:,.0f} tokens/s in steps of at most {prefill.step_tokens:,} tokens"
        )
    console.print(f"ceilings: {report.ceilings}; sustained: {report.sustained}")
    console.print(f"weights made in {report.load_seconds:.1f} s; peak {report.peak_bytes / 1e9:.1f} GB")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "rank.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        save(report, arguments.out / "rank.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

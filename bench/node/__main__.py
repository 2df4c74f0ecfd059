"""DeepSeek-R1 divided over the GPUs of one host, or its first layers: decode steps against their floor.

`python -m bench.node [--tp N] [--dp N] [--ep N] [--layers N] [--experts w4a8|fp8] [--kv fp8|bf16]
[--requests 8 32 64 96] [--step-tokens N] [--out FILE]`

The engine that serves, in one process a GPU, over random weights; experts drawn uniformly at random, contexts of 3,500
tokens. The floor adds up the bytes and FLOPs of a rank's operations, then what it receives at the rate of a copy
between two GPUs. "served" is what a rank that batches serves of 3,500 tokens in and 1,000 out where prompts are made
beside answers, reckoned from the step and from the rate of prompts. FILE, of a line a case, is read first: cases that
stand there are not measured again.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.exchange.measure import wire_rate
from bench.exchange.processes import on_each_gpu
from bench.node.measure import Case, Options, Row, case_of, measure
from engine.parallel.layout import Layout

COLUMNS = ("layout", "requests", "step ms", "floor ms", "wire ms", "ratio", "sustained", "idle")
LAYER_COLUMNS = ("exchange us a layer", "routed us a layer", "agreement us")
SERVED_COLUMNS = ("prompts, tokens/s", "served: TPOT ms", "requests/min")
LARGEST_GROUPS = 9
OUTPUT_TOKENS = 1000


def table(rows: list[Row]) -> Table:
    case = rows[0].case
    shown = Table(title=f"{case.layers} layers of DeepSeek-R1, {case.experts} experts, {case.kv} KV")
    for column in (*COLUMNS, *LAYER_COLUMNS, *SERVED_COLUMNS):
        shown.add_column(column, justify="right")
    for row in rows:
        times = (row.step_ms, row.floor_ms, row.wire_ms, row.ratio, row.sustained_ratio)
        layer = (row.exchange_us, row.routed_us, row.agreement_us)
        cells = [*(f"{each:.2f}" for each in times), f"{row.idle_share:.1%}", *(f"{each:.1f}" for each in layer)]
        token_ms, per_minute = row.served(OUTPUT_TOKENS)
        cells += [f"{row.prompt_rate:,.0f}", f"{token_ms:.1f}", f"{per_minute:.1f}"]
        shown.add_row(row.case.layout, str(row.case.requests), *cells)
    return shown


def breakdown(rows: list[Row]) -> Table:
    shown = Table("ms of a step on the device", title="by kernel")
    names = dict.fromkeys(name for row in rows for name in list(row.breakdown)[:LARGEST_GROUPS])
    for row in rows:
        shown.add_column(str(row.case.requests), justify="right")
    for name in names:
        shown.add_row(name, *(f"{row.breakdown.get(name, 0) / 1000:.3f}" for row in rows))
    return shown


def read_rows(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [Row(**{**each, "case": Case(**each["case"])}) for each in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, help="by default all GPUs that tp leaves")
    parser.add_argument("--ep", type=int, help="by default one part a rank")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", choices=("w4a8", "fp8"), default="w4a8")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32, 64, 96])
    parser.add_argument("--steps", type=int, default=30, help="decode steps timed for each number")
    parser.add_argument("--step-tokens", type=int, default=8192, help="most of a step with prompts")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    dp = arguments.dp or torch.cuda.device_count() // arguments.tp
    if max(arguments.tp * dp, 2) > torch.cuda.device_count():
        parser.error(f"there are {torch.cuda.device_count()} CUDA devices here")
    layout = Layout(arguments.tp, dp, arguments.ep or arguments.tp * dp)
    what = (layout, arguments.layers, arguments.experts, arguments.kv)
    options = Options(*what, (), arguments.steps, arguments.step_tokens, wire_rate(), arguments.out)
    known = {row.case: row for row in read_rows(arguments.out)}
    missing = [count for count in arguments.requests if case_of(options, count) not in known]
    if missing:
        by_rank = on_each_gpu(layout, partial(measure, replace(options, requests=tuple(missing))))
        known |= {row.case: row for row in by_rank[0]}
    rows = [known[case_of(options, count)] for count in arguments.requests]
    console = Console(width=150)
    console.print(breakdown(rows))
    console.print(table(rows))
    console.print(f"wire: {options.wire_rate / 1e9:.0f} GB/s a direction between two {torch.cuda.get_device_name()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

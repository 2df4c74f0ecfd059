"""DeepSeek-R1 divided over the GPUs of one host, or its first layers: decode steps against their floor.

`python -m bench.node [--tp N] [--dp N] [--ep N] [--layers N] [--experts w4a8|fp8] [--kv fp8|bf16]
[--requests 8 32 64 96] [--next-n N|auto [--acceptance A,B,C ...]] [--step-tokens N] [--out FILE]`

The engine that serves, in one process a GPU, over random weights; experts drawn uniformly at random, contexts of 3,500
tokens. The floor adds up the bytes and FLOPs of a rank's operations, then what it receives at the rate of a copy
between two GPUs, or two sums over the ranks in each layer at the time that they take alone, if that is more. "served"
is what a rank that batches serves of 3,500 tokens in and 1,000 out where prompts are computed with answers, by
arithmetic from the step and from the rate of prompts.

With --next-n steps have drafts, of one MTP module, and the floor counts the rows that are verified and the drafts. As
many are accepted as --acceptance says: the share of a request's steps in which its first draft is right, in which its
first and second are, and so on. FILE, of a line a case, is read first: cases that stand there are not measured again.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from bench.exchange.measure import wire_rate
from bench.exchange.processes import on_each_gpu
from bench.node.measure import SHAPE, Options, measure
from bench.node.rows import read_rows
from bench.node.tables import breakdown, rates_table, steps_table
from bench.rank.acceptance import ACCEPTANCE, parse_next_n, parse_shares
from bench.rank.model import MeasuredModel
from engine.parallel.layout import Layout


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
    parser.add_argument("--next-n", type=parse_next_n, default=0, help="drafts, or auto")
    parser.add_argument("--acceptance", type=parse_shares, nargs="+", default=ACCEPTANCE)
    parser.add_argument("--step-tokens", type=int, default=8192, help="most of a step with prompts")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    dp = arguments.dp or torch.cuda.device_count() // arguments.tp
    if max(arguments.tp * dp, 2) > torch.cuda.device_count():
        parser.error(f"there are {torch.cuda.device_count()} CUDA devices here")
    layout = Layout(arguments.tp, dp, arguments.ep or arguments.tp * dp)
    model = MeasuredModel(SHAPE, arguments.layers, arguments.experts, arguments.kv)
    steps = arguments.next_n, arguments.steps, arguments.step_tokens
    options = Options(layout, model, *steps, wire_rate(), arguments.out)
    cases = options.cases(arguments.requests, arguments.acceptance)
    known = {row.case: row for row in read_rows(arguments.out)}
    missing = [case for case in cases if case not in known]
    if missing:
        by_rank = on_each_gpu(layout, partial(measure, options, missing))
        known |= {row.case: row for row in by_rank[0]}
    rows = [known[case] for case in cases]
    console = Console(width=150)
    console.print(breakdown(rows))
    console.print(steps_table(rows))
    console.print(rates_table(rows, layout.dp))
    console.print(f"wire: {options.wire_rate / 1e9:.0f} GB/s a direction between two {torch.cuda.get_device_name()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

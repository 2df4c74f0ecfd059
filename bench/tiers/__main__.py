"""Where the KV of one rank of a published model may lie, and what it costs to move it.

    python -m bench.tiers [--shape r1-ep8-rank] [--layers N] [--kv bf16 fp8] [--prefixes 2048 8192 32768]
    [--directory ON_THE_DISK] [--no-steps] [--no-first-tokens] [--tp N] [--dp N]

The real engine runs over random weights and random KV, in this process; stores are processes of their own. Without a
GPU it runs over r1-kv, a model with R1's KV and little else: what moves is the same, what is computed is not.

First tokens: a prompt's prefix lies nowhere (it is computed again), in the pool, in host memory, in the memory of a
store, mapped or brought by UCX, and on a store's disk. Blocks from stores are checked by their MACs, as in a mesh that
`deepmesh up` starts, but for the row "trusted". "Moving" is how much later the first token is than with the
prefix in the pool; a bare copy is one of as many bytes from page-locked memory in the same round. Medians.

Steps: requests decode while KV lands in the pool and evicts other blocks, and while requests come whose prefixes are
known, with an engine that keeps evicted blocks in host memory and one that does not. Both do the same otherwise. With
--tp and --dp several ranks divide the model, one a GPU, and the times are those of the first.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from bench.rank.load import fill_pool
from bench.rank.model import MeasuredModel, make_rank
from bench.tiers.configuration import config_of
from bench.tiers.decode_steps import DecodeLoad, measure_steps, steps_table
from bench.tiers.first_tokens import PrefixBench, first_tokens_table
from bench.tiers.rank import TierBackend
from bench.tiers.several_ranks import steps_of_ranks
from capacity.shapes import EXPERTS, SHAPES
from engine.model.model import Model
from engine.parallel.layout import Layout
from engine.settings.device import Hardware, resolve
from mesh.blocks import BLOCK_TOKENS
from transfer.tuning import tune_for_gpu_transfers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="r1-ep8-rank")
    parser.add_argument("--layers", type=int, help="by default those of the shape")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="fp8")
    parser.add_argument("--kv", choices=("bf16", "fp8"), nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32, help="that decode")
    parser.add_argument("--context", type=int, default=3500, help="tokens of each of them")
    parser.add_argument("--steps", type=int, default=60, help="timed for each row")
    parser.add_argument("--landing-gb", type=float, default=10.0, help="GB/s of KV that lands meanwhile")
    parser.add_argument("--no-steps", action="store_true", help="leave out the steps")
    parser.add_argument("--no-first-tokens", action="store_true", help="leave out the first tokens")
    parser.add_argument("--tp", type=int, default=1, help="ranks that compute a request together, for the steps")
    parser.add_argument("--dp", type=int, default=1, help="groups of them; each has the requests")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk that is measured")
    given = parser.parse_args()
    if any(prefix % BLOCK_TOKENS for prefix in given.prefixes):
        parser.error(f"a prefix has whole blocks: give multiples of {BLOCK_TOKENS} tokens")
    if torch.cuda.is_available():
        tune_for_gpu_transfers()
    elif given.shape != "r1-kv":
        parser.error("such a model is measured on a CUDA device, and there is none here: give --shape r1-kv")
    layout = Layout(given.tp, given.dp, given.tp * given.dp)
    if layout.world > 1 and not given.no_first_tokens:
        parser.error("first tokens are those of one rank: give --no-first-tokens with --tp or --dp")
    if layout.world > max(torch.cuda.device_count(), 1):
        parser.error(f"there are {torch.cuda.device_count()} CUDA devices here")
    console = Console(width=160)
    layers = given.layers or SHAPES[given.shape]["num_hidden_layers"]
    load = DecodeLoad(given.requests, given.context, given.steps, given.landing_gb)
    model: Model | None = None
    rows = []
    with tempfile.TemporaryDirectory(dir=given.directory) as scratch:
        for kv in given.kv:
            measured = MeasuredModel(given.shape, layers, given.experts, kv)
            if layout.world > 1:
                title = f"{measured.title}, {kv} KV, tp {layout.tp} dp {layout.dp}"
                console.print(steps_table(steps_of_ranks(measured, load, layout), load, title))
                continue
            config = config_of(measured, Path(scratch), max(given.prefixes), load)
            model = model or make_rank(resolve(config, Hardware(torch.cuda.device_count(), 0)))
            backend = TierBackend(config, model)
            fill_pool(backend.state)
            if not given.no_steps:
                console.print(steps_table(measure_steps(backend, load), load, f"{measured.title}, {kv} KV"))
            if not given.no_first_tokens:
                disk = Path(scratch) / kv
                disk.mkdir()
                rows += asyncio.run(PrefixBench(backend, given.prefixes, given.rounds, console.print).measure(kv, disk))
                console.print(first_tokens_table(rows, measured.title))
            # Make room for the next pool.
            del backend
            gc.collect()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

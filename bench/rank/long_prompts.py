"""Long prompts on one rank of a model, exact and with sparse attention, in one run: tokens/s and memory.

`python -m bench.rank.long_prompts [--shape r1-ep8-rank|v32-ep8-rank] [--tokens 32768 131072] [--kept 0.05 0.025]
[--step-tokens 16384] [--kv bf16|fp8] [--prompts bf16|fp8]`

What sparse attention leaves out depends on the text, and random weights attend to everything. The engine therefore
chooses its lines, which takes its usual time, and the bench then replaces them by lines that keep about the share
--kept of a chunk's blocks (one number for each of --tokens): half of them random columns, half the nearest distances.
The engine itself measures the share that was computed. Without --kept all prompts are exact, as those of models that
select tokens by themselves must be. Memory is what a prompt takes in addition to weights, KV pool
and the workspace of single tokens.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from bench.rank.load import RankLoad
from bench.rank.model import MeasuredModel, make_rank
from capacity.shapes import EXPERTS, SHAPES
from engine.config import EngineConfig, SparsePrefillConfig
from engine.engine import Engine
from engine.model import expanded_form
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from kernels.sparse_prefill import Selection, select_lines

RECALL = 0.95
SPARE_TOKENS = 256


@dataclass(frozen=True)
class LongPrompt:
    """Attributes:
    kept: the share of the sparse chunks' blocks that was computed; None if the prompt was exact.
    """

    tokens: int
    kept: float | None
    seconds: float
    peak_bytes: int


class InjectedLines:
    """Makes the engine choose lines, then replaces them by others that keep a given share."""

    def __init__(self, share: float) -> None:
        self._share = share

    def select_lines(self, query: torch.Tensor, key: torch.Tensor, *, scale: float, recall: float) -> Selection:
        chosen = select_lines(query, key, scale=scale, recall=recall)
        columns = torch.rand(chosen.columns.shape, device=query.device) < self._share / 2
        columns[:, 0] = True
        nearest = max(round(chosen.blocks * self._share / 2), 2)
        slashes = torch.arange(chosen.blocks, device=query.device) < nearest
        return Selection(columns, slashes.expand_as(columns))

    @contextmanager
    def injected(self) -> Iterator[None]:
        with mock.patch.object(expanded_form, "select_lines", self.select_lines):
            yield


class LongPromptBench:
    def __init__(self, measured: MeasuredModel, step_tokens: int, most_tokens: int, sparse: bool) -> None:
        """sparse: whether sparse attention is to be measured as well."""
        with tempfile.TemporaryDirectory() as scratch:
            config = EngineConfig(
                **measured.settings(Path(scratch)),
                max_requests=1,
                graph_rows=(1,),
                max_step_tokens=step_tokens,
                context_tokens=most_tokens + SPARE_TOKENS,
                sparse_prefill=SparsePrefillConfig(recall=RECALL) if sparse else SparsePrefillConfig(),
                # The bench runs each kind of step once before it measures.
                warm_up="off",
                # Memory of the host is locked while an engine is young.
                host_blocks=0,
            )
            resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
            backend = ModelBackend(resolved, make_rank(resolved))
        self._sparse = config.sparse_prefill.offered
        self._load = RankLoad(Engine(config, backend, time.monotonic), backend)

    def warm_up(self, tokens: int, share: float | None) -> None:
        """Run once, so that kernels are compiled and products are prepared before times count."""
        self._load.prefill_seconds(1, tokens)
        if share is not None:
            self._prompt(tokens, share)

    def exact(self, tokens: int) -> LongPrompt:
        return self._measured(tokens, None)

    def sparse(self, tokens: int, share: float) -> LongPrompt:
        return self._measured(tokens, share)

    def _measured(self, tokens: int, share: float | None) -> LongPrompt:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._load.sparse.clear()
        seconds = self._prompt(tokens, share)
        torch.cuda.synchronize()
        kept = None if share is None else mean(measure.density for measure in self._load.sparse)
        return LongPrompt(tokens, kept, seconds, torch.cuda.max_memory_allocated() - before)

    def _prompt(self, tokens: int, share: float | None) -> float:
        if share is None:
            return self._load.prefill_seconds(1, tokens)
        with InjectedLines(share).injected():
            return self._load.prefill_seconds(1, tokens, self._sparse)


def table_of(measured: Sequence[LongPrompt]) -> Table:
    table = Table(title="one prompt, until its first token")
    for column in ("tokens", "blocks computed", "seconds", "tokens/s", "against exact", "peak, GB"):
        table.add_column(column, justify="right")
    exact = {row.tokens: row.seconds for row in measured if row.kept is None}
    for row in measured:
        kept = "all" if row.kept is None else f"{row.kept:.1%}"
        speed = f"{row.seconds:.2f}", f"{row.tokens / row.seconds:,.0f}", f"{exact[row.tokens] / row.seconds:.2f}"
        table.add_row(f"{row.tokens:,}", kept, *speed, f"{row.peak_bytes / 1e9:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="r1-ep8-rank")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--prompts", choices=("bf16", "fp8"), default="bf16", help="in which exact ones attend")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="fp8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--kept", type=float, nargs="+", default=[], help="shares, in the order of --tokens")
    parser.add_argument("--step-tokens", type=int, default=16384)
    arguments = parser.parse_args()
    if arguments.kept and len(arguments.tokens) != len(arguments.kept):
        parser.error("--kept has one share for each of --tokens, or is left out")
    if not torch.cuda.is_available():
        parser.error("a rank is measured on a CUDA device, and there is none here")
    console = Console(width=120)
    model = MeasuredModel(arguments.shape, arguments.layers, arguments.experts, arguments.kv, arguments.prompts)
    bench = LongPromptBench(model, arguments.step_tokens, max(arguments.tokens), bool(arguments.kept))
    bench.warm_up(min(arguments.tokens), min(arguments.kept, default=None))
    measured: list[LongPrompt] = []
    for tokens, share in zip_longest(arguments.tokens, arguments.kept):
        measured.append(bench.exact(tokens))
        if share is not None:
            measured.append(bench.sparse(tokens, share))
        console.print(table_of(measured))


if __name__ == "__main__":
    main()

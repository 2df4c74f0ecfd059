"""deepmesh and transformers on one checkpoint: same machine, same threads, same run, repeats interleaved.

`python -m bench.transformers_peer [--model DIR] [--threads N] [--repeats N] [--json FILE]`
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from bench.transformers_peer.candidates import Candidate, Deepmesh, Transformers
from tools.make_checkpoint import make_checkpoint

# Two ways in which transformers computes experts; its figures are those of the better one. A third way, batched_mm,
# copies the experts of every token: it is no faster in decode and takes minutes for a long prompt.
EXPERTS = ("eager", "grouped_mm")
PROMPT_TOKENS = 128
DECODE_TOKENS = 48
REQUESTS = 16
REQUEST_TOKENS = 32
PREFILL_TOKENS = 2048
WARM_TOKENS = 4


@dataclass(frozen=True)
class Comparison:
    """One measurement: median tokens per second of both sides, and the ratio that deepmesh has to reach."""

    measurement: str
    deepmesh: float
    peer: float
    peer_name: str
    target: float | None

    @property
    def ratio(self) -> float:
        return self.deepmesh / self.peer


def compare(ours: Deepmesh, theirs: Sequence[Candidate], repeats: int) -> list[Comparison]:
    """Take every measurement on every side once in each repeat, so that a slow moment of the machine hits all sides."""
    single, long = _prompt(PROMPT_TOKENS, 0), _prompt(PREFILL_TOKENS, 1)
    prompts = [_prompt(PROMPT_TOKENS, 2 + index) for index in range(REQUESTS)]
    sides: list[Candidate] = [ours, *theirs]
    decoded = _medians(
        {side.name: partial(_rate, DECODE_TOKENS - 1, side.decode, single, DECODE_TOKENS) for side in sides}, repeats
    )
    prefilled = _medians({side.name: partial(_rate, PREFILL_TOKENS, side.prefill, long) for side in sides}, repeats)
    fastest = max(theirs, key=lambda side: decoded[side.name])
    total, own_turns = REQUESTS * REQUEST_TOKENS, f"{ours.name}, in turn"
    served = _medians(
        {
            ours.name: partial(_rate, total, ours.together, prompts, REQUEST_TOKENS),
            own_turns: partial(_rate, total, ours.in_turn, prompts, REQUEST_TOKENS),
            fastest.name: partial(_rate, total, fastest.in_turn, prompts, REQUEST_TOKENS),
        },
        repeats,
    )
    title = f"{REQUESTS} requests at once; peer in turn"
    return [
        _against_best("decode, batch 1", decoded, ours.name, target=1.0),
        Comparison(title, served[ours.name], served[fastest.name], fastest.name, target=4.0),
        Comparison(title, served[ours.name], served[own_turns], ours.name, target=None),
        _against_best(f"prefill of {PREFILL_TOKENS} tokens", prefilled, ours.name, target=1.0),
    ]


def _rate(tokens: int, measure: Callable[..., float], *arguments: object) -> float:
    """Tokens per second if `tokens` tokens take `measure(*arguments)` seconds."""
    return tokens / measure(*arguments)


def _medians(measurements: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    values = [{name: measure() for name, measure in measurements.items()} for _ in range(repeats)]
    return {name: median(repeat[name] for repeat in values) for name in measurements}


def _against_best(measurement: str, medians: Mapping[str, float], ours: str, target: float) -> Comparison:
    best = max((name for name in medians if name != ours), key=lambda name: medians[name])
    return Comparison(measurement, medians[ours], medians[best], best, target)


def _prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(7, 102), k=tokens)


def _table(comparisons: Sequence[Comparison], threads: int) -> Table:
    table = Table(title=f"tokens/s, float32, {threads} threads, medians")
    for column in ("measurement", "deepmesh", "peer", "peer's", "ratio", "target"):
        table.add_column(column, justify="left" if column in ("measurement", "peer") else "right")
    for row in comparisons:
        target = "" if row.target is None else f"{'met' if row.ratio >= row.target else 'MISSED'}: {row.target:.0f}"
        cells = (row.measurement, f"{row.deepmesh:.1f}", row.peer_name, f"{row.peer:.1f}", f"{row.ratio:.2f}", target)
        table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; by default a random one of 30M parameters is made")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = arguments.model or Path(scratch)
        if arguments.model is None:
            make_checkpoint(model_dir, "small")
        ours, theirs = Deepmesh(model_dir), [Transformers(model_dir, experts) for experts in EXPERTS]
        warm: list[Candidate] = [ours, *theirs]
        for side in warm:
            side.decode(_prompt(PROMPT_TOKENS, 0), WARM_TOKENS)
        comparisons = compare(ours, theirs, arguments.repeats)
    Console().print(_table(comparisons, arguments.threads))
    if arguments.json is not None:
        rows = [asdict(row) | {"ratio": row.ratio} for row in comparisons]
        arguments.json.write_text(
            json.dumps({"threads": arguments.threads, "comparisons": rows}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()

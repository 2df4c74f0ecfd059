"""What a constraint costs on this CPU: time per token of answers that a JSON schema constrains, and of free ones.

    python -m bench.constrained
    python -m bench.constrained --requests 1 --rounds 20

The engine alone decodes the given number of requests at a time, free and constrained in turn. A step counts if all its
rows decode. The model computes on one thread. Besides time it counts processor time, including that of masks. Each
round compares its own two halves, whichever comes first, so that other load on the machine disturbs both alike. Ratios
are medians over the rounds, with their quartiles.
"""

import argparse
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from engine.constraints.constraints import load_constraints
from engine.engine import Engine
from engine.protocol.messages import Submit
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from launcher.shipped_model import shipped_model
from mesh.domain.constraints import Constraint
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions

# The list of 1000 items is longer than max_tokens, so that an answer always ends at max_tokens.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}( [A-Z][a-z]+)?$"},
            "kind": {"enum": ["planet", "comet", "star"]},
            "size": {"type": "number", "minimum": 0},
        },
        "required": ["name", "kind", "size"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Constraint(f"start: %json {json.dumps(SCHEMA)}")
PROMPT_TOKENS = 64
FIRST_PLAIN_TOKEN = 300


@dataclass
class Steps:
    """Seconds of each step, and its processor seconds."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, directory: Path, requests: int, tokens: int) -> None:
        blocks = requests * 8
        config = EngineConfig(model_dir=directory, device="cpu", threads=1, max_requests=requests, total_blocks=blocks)
        backend = ModelBackend(resolve(config, Hardware(cuda_devices=0, free_memory_bytes=1 << 32)))
        self._compiled = threading.Semaphore(0)
        constraints = load_constraints(config, backend.vocabulary_size, backend.eos_token_ids, self._compiled.release)
        self._engine = Engine(config, backend, time.monotonic, constraints=constraints)
        self._requests, self._tokens = requests, tokens
        self._vocabulary_size = backend.vocabulary_size
        self._keys = 0

    def run(self, constraint: Constraint | None, steps: Steps, random: Random) -> None:
        for _ in range(self._requests):
            self._submit(constraint, random)
        while self._engine.has_work():
            began = time.perf_counter(), time.process_time()
            result = self._engine.step()
            ended = time.perf_counter(), time.process_time()
            if result is not None and len(result.outputs) == self._requests and result.outputs[0].cached_tokens is None:
                steps.seconds.append(ended[0] - began[0])
                steps.processor_seconds.append(ended[1] - began[1])

    def _submit(self, constraint: Constraint | None, random: Random) -> None:
        prompt = [random.randrange(FIRST_PLAIN_TOKEN, self._vocabulary_size) for _ in range(PROMPT_TOKENS)]
        request = TokenRequest(
            request_id=str(self._keys),
            token_ids=prompt,
            sampling=Sampling(temperature=0.6, top_p=0.95, seed=self._keys),
            stop=StopConditions(self._tokens, ignore_eos=True),
            constraint=constraint,
        )
        self._engine.submit(Submit(self._keys, request))
        self._keys += 1
        if constraint is not None:
            self._compiled.acquire()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    bench, random = Bench(options.model, options.requests, options.tokens), Random(0)
    kinds = {"free": None, "constrained": JSON}
    rounds: dict[str, list[Steps]] = {name: [] for name in kinds}
    for constraint in kinds.values():
        bench.run(constraint, Steps(), random)
    for number in range(options.rounds):
        for name in sorted(kinds, reverse=number % 2 == 1):
            rounds[name].append(Steps())
            bench.run(kinds[name], rounds[name][-1], random)
    _print(options.requests, rounds)


def _print(requests: int, rounds: Mapping[str, Sequence[Steps]]) -> None:
    table = Table(
        "answers", "steps", "ms a step", "of free", "processor ms a step", "of free", title=f"{requests} at a time"
    )
    for name, each in rounds.items():
        seconds = _compared([steps.seconds for steps in each], [steps.seconds for steps in rounds["free"]])
        processor = _compared(
            [steps.processor_seconds for steps in each], [steps.processor_seconds for steps in rounds["free"]]
        )
        table.add_row(name, str(sum(len(steps.seconds) for steps in each)), *seconds, *processor)
    Console().print(table)


def _compared(own: Sequence[Sequence[float]], free: Sequence[Sequence[float]]) -> tuple[str, str]:
    """Milliseconds and ratio, both from the rounds' medians."""
    ratios = [median(a) / median(b) for a, b in zip(own, free, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    spread = "" if low == high else f" ({low:.3f} to {high:.3f})"
    return f"{1000 * median(map(median, own)):.2f}", f"{middle:.3f}{spread}"


if __name__ == "__main__":
    main()

"""What a constraint costs on this CPU: time per token of answers that a JSON schema constrains, and of free ones.

    python -m bench.constrained
    python -m bench.constrained --requests 1 --rounds 20

The engine alone decodes as many requests at a time, free and constrained in turn, so that other load on the machine
disturbs both alike. A step counts if all its rows decode. The model computes on one thread. Beside time it counts
processor time, that of masks included.
"""

import argparse
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table

from cli.launcher.shipped_model import shipped_model
from engine.config import EngineConfig, Hardware, resolve
from engine.constraints.constraints import load_constraints
from engine.engine import Engine
from engine.protocol.messages import Submit
from engine.runner.backend import ModelBackend
from mesh.domain.constraints import Constraint
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions

# Its answers are as long as they may be: the list ends with max_tokens.
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
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    bench, random = Bench(options.model, options.requests, options.tokens), Random(0)
    kinds = {"free": (None, Steps()), "constrained": (JSON, Steps())}
    for constraint, _ in kinds.values():
        bench.run(constraint, Steps(), random)
    for _ in range(options.rounds):
        for constraint, steps in kinds.values():
            bench.run(constraint, steps, random)
    _print(options.requests, {name: steps for name, (_, steps) in kinds.items()})


def _print(requests: int, kinds: dict[str, Steps]) -> None:
    table = Table(
        "answers", "steps", "ms a step", "of free", "processor ms a step", "of free", title=f"{requests} at a time"
    )
    free = kinds["free"]
    for name, steps in kinds.items():
        seconds, processor = median(steps.seconds), median(steps.processor_seconds)
        table.add_row(
            name,
            str(len(steps.seconds)),
            f"{1000 * seconds:.2f}",
            f"{seconds / median(free.seconds):.3f}",
            f"{1000 * processor:.2f}",
            f"{processor / median(free.processor_seconds):.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

"""What drafts bring on this machine's CPU: tokens a second by the number of drafts, and how many are accepted.

    python -m bench.drafts
    python -m bench.drafts --requests 4 --next-n 0,1,2,3,4,5
    python -m bench.drafts --form answer

The engine alone decodes the shipped model's answers to held-out problems, greedily, this many requests at a time. It
counts tokens a second, and tokens a second of processor time, which other load on the machine disturbs less. It counts
the tokens that differ from those without drafts: only near ties of the logits may differ. With `--form answer` the text
after the thoughts is JSON with the answer in it; with `--form list` the whole answer is, a list as long as tokens last.

"Behind" is the processor time of what a decode step computes after the model's layers: head, draws, and with drafts the
draft layers and guesses. "Overhead" is the part of it that drafts add to the first run's, with the time of one of the
model's layers and the head in the same run as its unit: 1 for one draft if drafting costs as much as another layer.
"""

import argparse
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.constrained import JSON
from engine.backend import Launched
from engine.batch import Batch, Sample
from engine.config import EngineConfig
from engine.constraints.constraints import load_constraints
from engine.drafts.config import MOST_DRAFTS, DraftsConfig
from engine.engine import Engine
from engine.protocol.messages import StepResult, Submit
from engine.requests.thinking import CLOSE
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, ResolvedEngineConfig, resolve
from engine.step.shape import StepShape
from eval.tasks import SHORT_TASKS, draw
from launcher.shipped_model import shipped_model
from mesh.domain.constraints import Constraint
from mesh.domain.outputs import PromptLogprobs
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from tools.chat import ASSISTANT, THINK, USER
from tools.tokenizer_files import BEGIN

MAX_TOKENS = 300
Depth: TypeAlias = int | Literal["auto"]
TOTAL_BLOCKS = 128
ANSWER = {
    "type": "object",
    "properties": {"question": {"type": "string", "maxLength": 40}, "answer": {"type": "integer"}},
    "required": ["question", "answer"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Run:
    """All answers with one number of drafts. Seconds include those of prompts."""

    answers: list[list[int]]
    seconds: float
    processor_seconds: float
    # By place after a drawn token: drafts verified and accepted.
    verified: list[int]
    accepted: list[int]
    # Processor time of a decode step: of one of the model's layers, and of what follows all layers.
    layer_seconds: float
    drafting_seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    def tokens_a_row(self) -> float:
        rows = self.tokens - sum(self.accepted)
        return self.tokens / rows


class TimedBackend(ModelBackend):
    """Notes the processor time of decode steps: of all layers, and of what follows them."""

    def __init__(self, resolved: ResolvedEngineConfig) -> None:
        super().__init__(resolved)
        self.layers: list[float] = []
        self.after_draws: list[float] = []

    def launch(self, batch: Batch, shape: StepShape) -> Launched:
        started = time.process_time()
        launched = super().launch(batch, shape)
        if not batch.rows or not shape.decode_only:
            return launched
        self.layers.append(time.process_time() - started)
        return TimedStep(launched, self.after_draws)


@dataclass(frozen=True)
class TimedStep:
    step: Launched
    seconds: list[float]

    def draw(self) -> None:
        started = time.process_time()
        self.step.draw()
        self.seconds.append(time.process_time() - started)

    def collect(self) -> list[Sample | None]:
        return self.step.collect()

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        return self.step.prompt_logprobs()


def held_out_prompts(directory: Path, problems: int, seed: int) -> list[list[int]]:
    """Problems of every short task in turn, as the model was taught to be asked."""
    random, tokenizer = Random(seed), Tokenizer.from_file(str(directory / "tokenizer.json"))
    tasks = list(SHORT_TASKS.values())
    texts = [draw(tasks[index % len(tasks)], random, held_out=True).prompt for index in range(problems)]
    asked = [f"{BEGIN}{USER}{text}{ASSISTANT}{THINK}" for text in texts]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in asked]


class Answers:
    """An engine, and the forms that its answers have."""

    def __init__(self, config: EngineConfig, backend: ModelBackend, constraint: Constraint | None) -> None:
        self._compiled = threading.Semaphore(0)
        constraints = load_constraints(config, backend.vocabulary_size, backend.eos_token_ids, self._compiled.release)
        self._engine = Engine(config, backend, time.monotonic, constraints=constraints)
        self._constraint = constraint

    def to(self, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[StepResult]]:
        for key, prompt in enumerate(prompts):
            stop = StopConditions(MAX_TOKENS)
            request = TokenRequest(f"request-{key}", prompt, Sampling(), stop, constraint=self._constraint)
            self._engine.submit(Submit(key, request))
            if self._constraint is not None:
                self._compiled.acquire()
        answers: list[list[int]] = [[] for _ in prompts]
        results = []
        while self._engine.has_work():
            if (result := self._engine.step()) is not None:
                results.append(result)
                for output in result.outputs:
                    answers[output.key] += output.token_ids
        return answers, results


def form_of(name: str, directory: Path) -> Constraint | None:
    if name == "list":
        return JSON
    if name == "free":
        return None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Constraint(f"start: %json {json.dumps(ANSWER)}", free_until=tokenizer.token_to_id(CLOSE))


def measure(
    directory: Path,
    prompts: Sequence[list[int]],
    next_n: Depth,
    requests: int,
    threads: int,
    constraint: Constraint | None = None,
) -> Run:
    """Answer all prompts, `requests` at a time."""
    config = EngineConfig(
        model_dir=directory,
        device="cpu",
        threads=threads,
        total_blocks=TOTAL_BLOCKS,
        prefix_cache=False,
        drafts=DraftsConfig(next_n=next_n),
    )
    backend = TimedBackend(resolve(config, Hardware(cuda_devices=0, free_memory_bytes=0)))
    all_answers = Answers(config, backend, constraint)
    all_answers.to([prompts[0]])
    results: list[StepResult] = []
    answers: list[list[int]] = []
    started, processor = time.monotonic(), time.process_time()
    for first in range(0, len(prompts), requests):
        found, steps = all_answers.to(prompts[first : first + requests])
        answers += found
        results += steps
    seconds, processor_seconds = time.monotonic() - started, time.process_time() - processor
    counts = [result.drafts for result in results if result.drafts is not None]
    return Run(
        answers,
        seconds,
        processor_seconds,
        [sum(each.verified[place] for each in counts) for place in range(MOST_DRAFTS)],
        [sum(each.accepted[place] for each in counts) for place in range(MOST_DRAFTS)],
        median(backend.layers) / (backend.namespace.layers - backend.draft_layers),
        median(backend.after_draws),
    )


def report(runs: dict[Depth, Run], console: Console) -> None:
    table = Table("drafts", "tokens/s", "ratio", "tokens/CPU s", "ratio", "tokens a row", "accepted by place", "differ")
    table.add_column("a layer, ms")
    table.add_column("after draws, ms")
    table.add_column("overhead")
    first = next(iter(runs.values()))
    for next_n, run in runs.items():
        rate, processor_rate = run.tokens / run.seconds, run.tokens / run.processor_seconds
        places = [f"{yes / of:.0%}" for yes, of in zip(run.accepted, run.verified, strict=True) if of]
        differ = sum(one != other for one, other in zip(run.answers, first.answers, strict=True))
        table.add_row(
            str(next_n),
            f"{rate:.0f}",
            f"{rate / (first.tokens / first.seconds):.2f}",
            f"{processor_rate:.0f}",
            f"{processor_rate / (first.tokens / first.processor_seconds):.2f}",
            f"{run.tokens_a_row():.2f}",
            " ".join(places),
            str(differ),
            f"{run.layer_seconds * 1000:.2f}",
            f"{run.drafting_seconds * 1000:.2f}",
            f"{(run.drafting_seconds - first.drafting_seconds) / (run.layer_seconds + first.drafting_seconds):.2f}",
        )
    console.print(table)


def _depth(text: str) -> Depth:
    return "auto" if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--next-n", default="0,1,2,3", help="numbers of drafts or auto; the first is compared with")
    parser.add_argument("--problems", type=int, default=28)
    parser.add_argument("--requests", type=int, default=1, help="how many are answered at a time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=["free", "answer", "list"], default="free", help="of the answers")
    parser.add_argument("--model-dir", type=Path, help="by default tiny-r1, whose tokenizer others have too")
    options = parser.parse_args()
    directory = options.model_dir or shipped_model()
    prompts = held_out_prompts(directory, options.problems, options.seed)
    constraint = form_of(options.form, directory)
    runs = {
        next_n: measure(directory, prompts, next_n, options.requests, options.threads, constraint)
        for next_n in map(_depth, options.next_n.split(","))
    }
    report(runs, Console())


if __name__ == "__main__":
    main()

"""What relaxed acceptance of drafts brings and costs, with the shipped model on this machine's CPU.

    python -m bench.draft_quality --problems 15 --texts 10 --temperatures 1.0

The engine alone answers held-out problems, and continues sentences inside its thinking. Each configuration has the same
prompts and seeds. The bench reports tokens a row, drafts accepted by place, and right answers. For the sentences it
also reports the share of tokens that were accepted in place of the ones drawn, and the model's own surprise (nats a
token at temperature 1): it falls if tokens are only the likeliest ones, and rises if the model would hardly have drawn
them.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.drafts.config import MOST_DRAFTS, DraftsConfig
from engine.engine import Engine
from engine.protocol.messages import DraftCounts, StepResult, Submit
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from eval.tasks import SHORT_TASKS, Problem, draw, grade
from eval.tasks.prose import sentences
from launcher.shipped_model import shipped_model
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import DraftUse, Sampling, StopConditions
from tools.chat import ASSISTANT, THINK, USER
from tools.tokenizer_files import BEGIN

PROBLEM_TOKENS = 300
TEXT_TOKENS = 80
# Biases against </think> and the end of the answer, so that sentences stay thoughts.
THINK_ON = {1: -100.0, 6: -100.0}
CONFIGURATIONS = {
    "none": DraftsConfig(),
    "strict 1": DraftsConfig(next_n=1),
    "strict 3": DraftsConfig(next_n=3),
    "relaxed 3, N 3, delta 0.3": DraftsConfig(next_n=3, acceptance="relaxed", top_n=3, delta=0.3),
    "relaxed 3, N 10, delta 0.6": DraftsConfig(next_n=3, acceptance="relaxed", top_n=10, delta=0.6),
    "relaxed 3, N 10, delta 0.9": DraftsConfig(next_n=3, acceptance="relaxed", top_n=10, delta=0.9),
}


@dataclass(frozen=True)
class Prompts:
    problems: list[Problem]
    # Token ids of the problems' questions, and of the sentences to continue.
    asked: list[list[int]]
    texts: list[list[int]]


@dataclass(frozen=True)
class Answers:
    """The answers to one set of prompts."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    counts: list[DraftCounts]

    def tokens_a_row(self) -> float:
        tokens = sum(map(len, self.token_ids))
        return tokens / (tokens - sum(sum(each.accepted) for each in self.counts))

    def relaxed(self) -> float:
        """Share of tokens that are drafts, accepted although another token was drawn."""
        return sum(each.relaxed for each in self.counts) / sum(map(len, self.token_ids))

    def accepted(self) -> list[float]:
        """Share of accepted drafts by place. A draft after a wrong one is not accepted."""
        places = [
            (sum(each.accepted[place] for each in self.counts), sum(each.verified[place] for each in self.counts))
            for place in range(MOST_DRAFTS)
        ]
        return [accepted / verified for accepted, verified in places if verified]

    def surprise(self) -> float:
        """Nats a token."""
        return -sum(map(sum, self.logprobs)) / sum(map(len, self.logprobs))


def make_prompts(tokenizer: Tokenizer, problems: int, texts: int, seed: int) -> Prompts:
    random, tasks = Random(seed), list(SHORT_TASKS.values())
    drawn = [draw(tasks[index % len(tasks)], random, held_out=True) for index in range(problems)]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    asked = [ids(f"{BEGIN}{USER}{problem.prompt}{ASSISTANT}{THINK}") for problem in drawn]
    openings = [" ".join(sentences(random, 120)) for _ in range(texts)]
    return Prompts(drawn, asked, [ids(f"{BEGIN}{USER}Go on.{ASSISTANT}{THINK}{text}") for text in openings])


def make_engine(directory: Path, drafts: DraftsConfig, threads: int) -> Engine:
    config = EngineConfig(model_dir=directory, device="cpu", threads=threads, total_blocks=256, drafts=drafts)
    return Engine(config, ModelBackend(resolve(config, Hardware(0, 0))), time.monotonic)


def run(engine: Engine, prompts: Sequence[list[int]], temperature: float, tokens: int, *, endless: bool) -> Answers:
    for key, prompt in enumerate(prompts):
        sampling = Sampling(
            temperature=temperature,
            seed=key,
            top_logprobs=0,
            logit_bias=THINK_ON if endless else {},
            drafts=DraftUse.RELAXED,
        )
        stop = StopConditions(tokens, ignore_eos=endless)
        engine.submit(Submit(key, TokenRequest(f"request-{key}", prompt, sampling, stop)))
    answers = Answers([[] for _ in prompts], [[] for _ in prompts], [])
    while engine.has_work():
        result = engine.step()
        if result is not None:
            _record(answers, result)
    return answers


def _record(answers: Answers, result: StepResult) -> None:
    if result.drafts is not None:
        answers.counts.append(result.drafts)
    for output in result.outputs:
        answers.token_ids[output.key] += output.token_ids
        answers.logprobs[output.key] += [each.logprob for each in output.logprobs or ()]


def _row(engine: Engine, prompts: Prompts, tokenizer: Tokenizer, temperature: float) -> list[str]:
    answers = run(engine, prompts.asked, temperature, PROBLEM_TOKENS, endless=False)
    texts = run(engine, prompts.texts, temperature, TEXT_TOKENS, endless=True)
    replies = [tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in answers.token_ids]
    replies = [reply.partition("<｜end▁of▁sentence｜>")[0] for reply in replies]
    right = sum(map(grade, prompts.problems, replies))
    return [
        f"{right}/{len(replies)}",
        f"{answers.tokens_a_row():.2f}",
        " ".join(f"{share:.0%}" for share in answers.accepted()),
        f"{texts.tokens_a_row():.2f}",
        " ".join(f"{share:.0%}" for share in texts.accepted()),
        f"{texts.relaxed():.1%}",
        f"{texts.surprise():.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=30)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--temperatures", default="0.6,1.0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory = shipped_model()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = make_prompts(tokenizer, options.problems, options.texts, options.seed)
    console = Console(width=160)
    for temperature in map(float, options.temperatures.split(",")):
        table = Table(
            "drafts", "right", "tokens a row", "by place", "text: tokens a row", "by place", "relaxed", "nats"
        )
        table.title = f"temperature {temperature:g}"
        for name, drafts in CONFIGURATIONS.items():
            engine = make_engine(directory, drafts, options.threads)
            table.add_row(name, *_row(engine, prompts, tokenizer, temperature))
        console.print(table)


if __name__ == "__main__":
    main()

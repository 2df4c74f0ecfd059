"""The requests of a load run: synthetic prompts of given lengths, or the rows of a dataset."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from eval.workload import task_chats
from loadgen.options import MOST_TOKENS, LoadOptions
from mesh.errors import ConfigError
from mesh.text_files import read_text

# Ids below this are special tokens in most vocabularies.
FIRST_ORDINARY_TOKEN = 16
# Each word, with the space before it, is one token in the usual vocabularies.
COMMON_WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "it", "by", "at", "or")


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


TokensOrMessages: TypeAlias = tuple[int, ...] | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One request before it is sent. `prompt` is token ids, raw text, or chat messages, and never empty."""

    prompt: str | TokensOrMessages
    max_tokens: int
    # Whether the answer is to have max_tokens tokens, wherever the model would end it.
    exact: bool = False
    # Makes the session's next turn of the answer; None after the last turn, and for what is no session.
    following: "Callable[[Answer], Turn] | None" = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a session's next turn repeats: `text` if prompts are messages, `token_ids` if they are token ids."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A later request of a session, sent `pause_s` after the answer that it follows."""

    job: Job
    pause_s: float


class _Row(msgspec.Struct):
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None = None


def read_lines(path: Path) -> list[str]:
    """A dataset's lines, of which at least one is not blank. Raises ConfigError."""
    try:
        # Split at newlines only: splitlines() would also split at characters such as U+2028, which texts may contain.
        lines = read_text(path).split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error.strerror}") from error
    if not any(line.strip() for line in lines):
        raise ConfigError(f"the dataset {path} is empty")
    return lines


def dataset_rows(path: Path, lines: Sequence[str], default_max_tokens: int) -> list[Job]:
    """Rows of JSON lines, or lines of text, without the blank ones. Raises ConfigError naming the row that is wrong."""
    rows = [line for line in lines if line.strip()]
    if not rows[0].lstrip().startswith("{"):
        return [Job(row, default_max_tokens) for row in rows]
    return [_job(path, number, row, default_max_tokens) for number, row in enumerate(rows, start=1)]


def _job(path: Path, number: int, line: str, default_max_tokens: int) -> Job:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, row {number}: {error}") from error
    prompt = row.messages or row.prompt
    if not prompt:
        raise ConfigError(f'{path}, row {number}: expected "messages" or "prompt"')
    return Job(prompt, row.max_tokens or default_max_tokens)


def synthetic_jobs(options: LoadOptions, vocabulary_size: int, generator: np.random.Generator) -> Iterator[Job]:
    """Endless jobs of random token ids; equal options and generator state give equal jobs."""
    number, prefix_length = options.shared_prefixes
    prefixes = [draw_tokens(prefix_length, vocabulary_size, generator) for _ in range(number)]
    while True:
        length = draw_length(options.isl, options.range_ratio, generator)
        prefix = prefixes[int(generator.integers(len(prefixes)))] if prefixes else ()
        suffix = draw_tokens(length - len(prefix), vocabulary_size, generator)
        yield Job(prefix + suffix, draw_length(options.osl, options.range_ratio, generator), exact=True)


def dataset_jobs(rows: Sequence[Job]) -> Iterator[Job]:
    """The rows in order, again from the first when they run out."""
    while True:
        yield from rows


def task_jobs(seed: int) -> Iterator[Job]:
    """Endless chats made of the tasks that quality is judged by. They share prefixes as real traffic does."""
    for chat in task_chats(seed):
        yield Job(tuple(Message(each.role, each.content) for each in chat.messages), chat.max_tokens)


def as_messages(job: Job) -> Job:
    """The same job for an endpoint that only chats; token ids become `words`."""
    if isinstance(job.prompt, str):
        return replace(job, prompt=(Message("user", job.prompt),))
    prompt = job.prompt
    return job if isinstance(prompt[0], Message) else replace(job, prompt=(Message("user", words(prompt)),))


def words(token_ids: Sequence[int]) -> str:
    """Text of about as many tokens, one common word for each id; equal ids give equal words."""
    return " ".join(COMMON_WORDS[token_id % len(COMMON_WORDS)] for token_id in token_ids)


def draw_length(mean: int, ratio: float, generator: np.random.Generator) -> int:
    """Tokens, at least 1, uniform in [mean x (1 - ratio), mean x (1 + ratio)]."""
    spread = int(mean * ratio)
    return max(1, int(generator.integers(mean - spread, mean + spread + 1)))


def draw_tokens(count: int, vocabulary_size: int, generator: np.random.Generator) -> tuple[int, ...]:
    """Random ids of ordinary tokens."""
    return tuple(generator.integers(FIRST_ORDINARY_TOKEN, vocabulary_size, size=count).tolist())

"""The requests of a load run: synthetic prompts of given lengths, or the rows of a dataset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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
# This name stands for our own tasks rather than for a file.
TASKS = Path("tasks")


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Job:
    """One request before it is sent. `prompt` is token ids, raw text, or chat messages."""

    prompt: tuple[int, ...] | str | tuple[Message, ...]
    max_tokens: int


class _Row(msgspec.Struct):
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None = None


def read_dataset(path: Path, default_max_tokens: int) -> list[Job]:
    """Rows of a JSON-lines file, or lines of a text file. Raises ConfigError naming the line that is wrong."""
    try:
        # Split at newlines only: splitlines() would also split at characters such as U+2028, which texts may contain.
        lines = [line for line in read_text(path).split("\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"the dataset {path} is empty")
    if not lines[0].lstrip().startswith("{"):
        return [Job(line, default_max_tokens) for line in lines]
    return [_job(path, number, line, default_max_tokens) for number, line in enumerate(lines, start=1)]


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
    prefixes = [_tokens(options.prefix_length, vocabulary_size, generator) for _ in range(options.prefixes)]
    while True:
        length = _length(options.isl, options.range_ratio, generator)
        prefix = prefixes[int(generator.integers(len(prefixes)))] if prefixes else ()
        suffix = _tokens(length - len(prefix), vocabulary_size, generator)
        yield Job(prefix + suffix, _length(options.osl, options.range_ratio, generator))


def dataset_jobs(rows: Sequence[Job]) -> Iterator[Job]:
    """The rows in order, again from the first when they run out."""
    while True:
        yield from rows


def task_jobs(seed: int) -> Iterator[Job]:
    """Endless chats made of the tasks that quality is judged by. They share prefixes as real traffic does."""
    for chat in task_chats(seed):
        yield Job(tuple(Message(each.role, each.content) for each in chat.messages), chat.max_tokens)


def as_messages(job: Job) -> Job:
    """The same job for an endpoint that only chats. Each token id becomes a common word, so that the prompt has about
    the length that was asked for, but not exactly."""
    if isinstance(job.prompt, str):
        return Job((Message("user", job.prompt),), job.max_tokens)
    if isinstance(job.prompt[0], Message):
        return job
    words = [COMMON_WORDS[token_id % len(COMMON_WORDS)] for token_id in job.prompt if isinstance(token_id, int)]
    return Job((Message("user", " ".join(words)),), job.max_tokens)


def _length(mean: int, ratio: float, generator: np.random.Generator) -> int:
    spread = int(mean * ratio)
    return max(1, int(generator.integers(mean - spread, mean + spread + 1)))


def _tokens(count: int, vocabulary_size: int, generator: np.random.Generator) -> tuple[int, ...]:
    return tuple(generator.integers(FIRST_ORDINARY_TOKEN, vocabulary_size, size=count).tolist())

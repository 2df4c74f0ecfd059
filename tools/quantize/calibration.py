"""Texts, as token ids, from which the magnitudes of the experts' inputs are measured."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from eval.tasks import SHORT_TASKS, draw
from mesh.errors import ConfigError
from mesh.text.tokenizer_file import read_tokenizer, tokenizer_path
from mesh.text_files import read_text
from tools.chat import Turn, conversation
from tools.tokenizer_files import BEGIN

TASKS = "tasks"


@dataclass(frozen=True, slots=True)
class Calibration:
    # Each sequence has at least two token ids.
    sequences: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def digest(self) -> str:
        """Equal for equal sequences."""
        return hashlib.blake2b(json.dumps(self.sequences).encode(), digest_size=8).hexdigest()


def read_calibration(name: str, model_dir: Path, *, sequences: int, tokens: int, seed: int = 0) -> Calibration:
    """At most `sequences` texts, each cut after `tokens` tokens.

    name: "tasks", for solved problems of the evaluation's tasks (without those held out for tests), or a file. A file
    called .jsonl has JSON lines, each with a "text"; any other file is one long text. Raises ConfigError if there is no
    text.
    """
    if tokenizer_path(model_dir) is None:
        raise ConfigError(f"calibration needs the model's tokenizer, which {model_dir} lacks")
    tokenizer = Tokenizer.from_buffer(read_tokenizer(model_dir))
    texts = _solved_tasks(seed) if name == TASKS else _read_texts(Path(name))
    found = tuple(islice(_cut(tokenizer, texts, tokens), sequences))
    if not found:
        raise ConfigError(f"{name} holds no text to calibrate with")
    return Calibration(found)


def _cut(tokenizer: Tokenizer, texts: Iterator[str], tokens: int) -> Iterator[tuple[int, ...]]:
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(ids), tokens):
            # Leave out single tokens, which have nothing to attend to.
            if len(part := tuple(ids[start : start + tokens])) > 1:
                yield part


def _solved_tasks(seed: int) -> Iterator[str]:
    """Endless solved problems in the form of a chat: problem, thinking and answer."""
    random = Random(seed)
    for task in cycle(SHORT_TASKS.values()):
        problem = draw(task, random, held_out=False)
        example = conversation([Turn(problem.prompt, problem.reply, problem.reasoning)])
        yield example.context + example.completion


def _read_texts(path: Path) -> Iterator[str]:
    try:
        content = read_text(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if path.suffix != ".jsonl":
        yield BEGIN + content
        return
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            yield BEGIN + str(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'{path}, line {number}: expected a JSON object with "text"') from error

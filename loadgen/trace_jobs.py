"""Requests of a trace: synthetic prompts that are equal where the trace says that they were."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from loadgen.traces import BLOCK_TOKENS, TraceRow
from loadgen.workload import Job, draw_tokens, words

# What follows the seed in a text's own seed, so that no block is equal to the rest of a prompt.
_BLOCK, _REST = 0, 1
# Generators take no negative seeds.
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True)
class TraceJobs(Sequence[Job]):
    """The rows' requests, whose prompts are made when they are asked for: those of a whole trace take gigabytes.

    Equal hash ids give equal tokens; what no hash id covers is the row's alone. Equal seeds give equal prompts.
    """

    rows: Sequence[TraceRow]
    seed: int
    # Token ids lie below this.
    vocabulary_size: int
    # Whether prompts are text, for endpoints that take no token ids.
    as_text: bool

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> list[Job]: ...
    def __getitem__(self, index: int | slice) -> Job | list[Job]:
        numbers = range(len(self.rows))[index]
        return self._job(numbers) if isinstance(numbers, int) else [self._job(number) for number in numbers]

    def _job(self, number: int) -> Job:
        row = self.rows[number]
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            prompt += self._text(BLOCK_TOKENS, _BLOCK, hash_id)
        del prompt[row.input_length :]
        prompt += self._text(row.input_length - len(prompt), _REST, number)
        return Job(words(prompt) if self.as_text else tuple(prompt), row.output_length, exact=True)

    def _text(self, tokens: int, kind: int, number: int) -> tuple[int, ...]:
        generator = np.random.default_rng((self.seed, kind, number & _SEED_MASK))
        return draw_tokens(tokens, self.vocabulary_size, generator)

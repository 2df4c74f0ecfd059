"""Sessions of several turns: each prompt repeats all that was said, with the model's own answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from loadgen.options import LoadOptions
from loadgen.workload import Answer, Job, Message, TokensOrMessages, Turn, draw_length, draw_tokens, words


def session_jobs(options: LoadOptions, vocabulary_size: int, generator: np.random.Generator) -> Iterator[Job]:
    """Endless sessions' first requests, each with what follows it. Sessions share a few system prompts.

    Over gRPC they are token ids, of exactly the lengths asked for; over HTTP chats, of about these lengths.
    """
    number, length = options.shared_prefixes
    systems = [draw_tokens(length, vocabulary_size, generator) for _ in range(number)] or [()]
    while True:
        system = systems[int(generator.integers(len(systems)))]
        # Each has a generator of its own: what it draws depends neither on other sessions nor on the answers' times.
        yield _Session(options, vocabulary_size, generator.spawn(1)[0]).begin(system)


@dataclass(frozen=True)
class _Session:
    options: LoadOptions
    vocabulary_size: int
    generator: np.random.Generator

    def begin(self, system: tuple[int, ...]) -> Job:
        asked = self._tokens(self.options.isl, less=len(system))
        if self.options.url is None:
            return self._job((*system, *asked), 1)
        opening = (Message("system", words(system)),) if system else ()
        return self._job((*opening, Message("user", words(asked))), 1)

    def _job(self, prompt: TokensOrMessages, turn: int) -> Job:
        following = partial(self._follow, prompt, turn + 1) if turn < self.options.turns else None
        most = draw_length(self.options.osl, self.options.range_ratio, self.generator)
        return Job(prompt, most, exact=True, following=following)

    def _follow(self, prompt: TokensOrMessages, turn: int, answer: Answer) -> Turn:
        """The next turn after this prompt was answered."""
        pause_s = float(self.generator.exponential(self.options.think_s))
        return Turn(self._job(_extended(prompt, answer, self._tokens(self.options.turn_tokens)), turn), pause_s)

    def _tokens(self, mean: int, less: int = 0) -> tuple[int, ...]:
        count = draw_length(mean, self.options.range_ratio, self.generator) - less
        return draw_tokens(count, self.vocabulary_size, self.generator)


def _extended(prompt: TokensOrMessages, answer: Answer, asked: tuple[int, ...]) -> TokensOrMessages:
    if isinstance(prompt[0], Message):
        return (*prompt, Message("assistant", answer.text), Message("user", words(asked)))
    return (*prompt, *answer.token_ids, *asked)

"""Chooses the likeliest among several answers."""

from collections.abc import Sequence
from statistics import fmean

from gateway.openai.form import Answer


def likeliest(answers: Sequence[Answer], each: int, chosen: int) -> list[Answer]:
    """For each prompt, the `chosen` answers with the highest mean log probability of their tokens, best first. `each`:
    answers per prompt.
    """
    prompts = (answers[first : first + each] for first in range(0, len(answers), each))
    return [answer for group in prompts for answer in sorted(group, key=_mean_logprob, reverse=True)[:chosen]]


def _mean_logprob(answer: Answer) -> float:
    return fmean(entry.logprob for entry in answer.logprobs) if answer.logprobs else float("-inf")

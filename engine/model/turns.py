"""Computations that take turns: while one waits for other ranks, the device computes the next."""

from collections import deque
from collections.abc import Generator, Sequence
from typing import TypeVar

ResultT = TypeVar("ResultT")
# A computation that yields when it has begun an exchange and needs the result of that to go on.
Turns = Generator[None, None, ResultT]


def take_turns(computations: Sequence[Turns[ResultT]]) -> list[ResultT]:
    """The results of the computations, which go on one after another, always in the same order."""
    results: dict[int, ResultT] = {}
    waiting = deque(enumerate(computations))
    while waiting:
        index, computation = waiting.popleft()
        try:
            next(computation)
        except StopIteration as ended:
            results[index] = ended.value
        else:
            waiting.append((index, computation))
    return [results[index] for index in range(len(computations))]


def alone(computation: Turns[ResultT]) -> ResultT:
    """The computation's result, with nothing else to compute meanwhile."""
    (result,) = take_turns([computation])
    return result

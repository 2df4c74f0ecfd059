"""Two parts of a layer at once on one GPU."""

from collections.abc import Callable
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


class SideStream:
    """A stream beside the current one, which every fork waits for and every join is waited for by.

    Memory needs no more care than that: what a branch allocates is used again by later branches only, and these begin
    after everything that came before them on the main stream.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def run(self, aside: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            first = aside()
        second = main()
        current.wait_stream(self._stream)
        return first, second


def together(side: SideStream | None, aside: Callable[[], A], main: Callable[[], B]) -> tuple[A, B]:
    """Both results; one after the other where there is no side stream. Neither may use what the other makes."""
    return (aside(), main()) if side is None else side.run(aside, main)

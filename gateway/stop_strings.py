"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    string: str


class StopStrings:
    """Watches streamed text for the first stop string that completes; the longest if several complete at once.

    Emits text as soon as no stop string can begin in it. Each string has its own Knuth-Morris-Pratt automaton, so the
    result does not depend on how the text was split, and a character costs O(1) amortized per string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_Automaton(string) for string in sorted(strings, key=len, reverse=True)]
        self._held = ""

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """(text to emit, the match that ends the stream). After a match nothing may be pushed."""
        if not self._automata:
            return text, None
        whole = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            for automaton in self._automata:
                if automaton.step(character):
                    self._held = ""
                    return whole[: index + 1 - len(automaton.string)], StopMatch(automaton.string)
        keep = max(automaton.matched for automaton in self._automata)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Tracks how much of one string the text seen so far ends with."""

    __slots__ = ("_fallback", "matched", "string")

    def __init__(self, string: str) -> None:
        assert string
        self.string = string
        self.matched = 0
        self._fallback = _fallbacks(string)

    def step(self, character: str) -> bool:
        """Advance by one character; True if it completes the string."""
        while self.matched and self.string[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.string[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.string)


def _fallbacks(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    lengths, length = [0] * len(string), 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = lengths[length - 1]
        if string[index] == string[length]:
            length += 1
        lengths[index] = length
    return lengths

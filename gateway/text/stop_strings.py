"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.text.signs import NO_SIGNS, Signs


@dataclass(frozen=True, slots=True)
class StopMatch:
    string: str


class StopStrings:
    """Watches streamed text for the first stop string that completes; the longest if several complete at once.

    Emits text as soon as no stop string can begin in it. Each string has its own Knuth-Morris-Pratt automaton, so the
    result does not depend on how the text was split, and a character costs O(1) amortized per string.
    """

    def __init__(self, strings: Sequence[str], signs: Signs = NO_SIGNS) -> None:
        """signs: of the text, which is signed. A marker's sign counts as its letters."""
        self._automata = [_Automaton(string) for string in sorted(strings, key=len, reverse=True)]
        self._letters = signs.texts
        # Signed text that is held back; `_lengths` has the number of letters of each of its characters.
        self._held = ""
        self._lengths: list[int] = []

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """(text to emit, the match that ends the stream). After a match nothing may be pushed."""
        if not (self._automata and text):
            return text, None
        self._held += text
        for sign in text:
            letters = self._letters.get(ord(sign), sign)
            self._lengths.append(len(letters))
            for count, letter in enumerate(letters, start=1):
                for automaton in self._automata:
                    if automaton.step(letter):
                        return self._before_match(count, automaton.string), StopMatch(automaton.string)
        keep = self._covering(max(automaton.matched for automaton in self._automata))
        return self._emitted(len(self._lengths) - keep), None

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        return self._emitted(len(self._lengths))

    def _before_match(self, count: int, string: str) -> str:
        """The text before a match, which ends with the first `count` letters of the character that was read last."""
        read = len(self._lengths)
        self._lengths[-1] = count
        whole = self._covering(len(string))
        # The match may begin inside the letters of a sign.
        spare = sum(self._lengths[read - whole :]) - len(string)
        first = self._held[read - whole]
        before = self._held[: read - whole] + self._letters.get(ord(first), first)[:spare]
        self._held, self._lengths = "", []
        return before

    def _covering(self, letters: int) -> int:
        """How many of the held characters have at least this many letters, counted from the last."""
        count = 0
        while letters > 0:
            count += 1
            letters -= self._lengths[-count]
        return count

    def _emitted(self, count: int) -> str:
        emitted, self._held = self._held[:count], self._held[count:]
        del self._lengths[:count]
        return emitted


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

"""Finds markers in an answer that streams."""

from collections.abc import Sequence


class JsonPlace:
    """Whether the end of some JSON text is inside a string. A line break ends a string, as JSON allows none in it."""

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False

    def copy(self) -> "JsonPlace":
        same = JsonPlace()
        same._in_string, same._escaped = self._in_string, self._escaped
        return same

    @property
    def in_string(self) -> bool:
        return self._in_string

    def pass_over(self, text: str) -> None:
        for character in text:
            if not self._in_string:
                self._in_string = character == '"'
            elif self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character in '"\n':
                self._in_string = False


class Markers:
    """Some markers as they appear in signed text: signs of one character, or letters."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        # Only letters can come in pieces, or stand in a string of JSON.
        self._lettered = [marker for marker in markers if len(marker) > 1]

    def first(self, text: str, place: JsonPlace | None = None) -> tuple[int, str] | None:
        """Position of the first marker in the text, and the marker.

        place: where the text begins, if it is JSON. Letters inside a string of JSON are no marker; signs are.
        """
        found = [(position, marker) for marker in self._markers if (position := text.find(marker)) >= 0]
        if place is None or not self._lettered:
            return min(found, default=None)
        place, passed = place.copy(), 0
        while found:
            position, marker = min(found)
            place.pass_over(text[passed:position])
            passed = position
            if len(marker) == 1 or not place.in_string:
                return position, marker
            found.remove((position, marker))
            if (later := text.find(marker, position + 1)) >= 0:
                found.append((later, marker))
        return None

    def begun(self, text: str) -> int:
        """Length of the longest suffix of the text that is the beginning of a marker, but not all of it."""
        return max((_overlap(text, marker) for marker in self._lettered), default=0)


def _overlap(text: str, marker: str) -> int:
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)

"""Markers in the text of an answer: those that the model wrote as tokens, told from their letters."""

import re
from collections.abc import Callable, Iterable, Mapping

# No decoded text has a lone surrogate.
FIRST_SIGN = 0xD800
LAST_SIGN = 0xDFFF


class Signs:
    """Gives each marker that is a token of the vocabulary a sign: one character that no text can hold.

    In signed text, a sign is a token that the model wrote, and a marker's letters are only letters. A marker that the
    vocabulary lacks has no sign; its letters are all there is to find.
    """

    def __init__(self, markers: Iterable[str], control_id: Callable[[str], int | None]) -> None:
        """control_id: the id of the token with this text; None if there is none."""
        found = [(text, token) for text in sorted(markers) if (token := control_id(text)) is not None]
        assert len(found) <= LAST_SIGN - FIRST_SIGN
        self._signs = {text: chr(FIRST_SIGN + index) for index, (text, _) in enumerate(found)}
        self._of_tokens = {token: self._signs[text] for text, token in found}
        self._texts = {ord(sign): text for text, sign in self._signs.items()}
        self._markers = re.compile("|".join(map(re.escape, sorted(self._signs, key=len, reverse=True))) or "(?!)")

    def of(self, marker: str) -> str:
        """How the marker appears in signed text."""
        return self._signs.get(marker, marker)

    def of_token(self, token_id: int) -> str | None:
        """The sign of a token; None if it is no marker."""
        return self._of_tokens.get(token_id)

    def signed(self, text: str) -> str:
        """Text that we wrote, whose markers became tokens."""
        return self._markers.sub(lambda found: self._signs[found[0]], text)

    def spelled(self, signed: str) -> str:
        """The text as it is shown."""
        return signed.translate(self._texts) if self._texts else signed

    @property
    def texts(self) -> Mapping[int, str]:
        """Markers by the code points of their signs."""
        return self._texts


NO_SIGNS = Signs((), lambda text: None)

"""Keeping control tokens out of message contents: a defence against prompt injection through the chat template."""

import re
from collections.abc import Collection, Iterable

from gateway.reasoning import THINK_CLOSE, THINK_OPEN
from gateway.tokenizer import Tokenizer
from mesh.errors import InvalidRequest

# Supplementary private use plane: 65,534 characters without meaning.
STAND_INS = range(0xF0000, 0xFFFFE)


class ControlTextShield:
    """Disguises message contents while the template runs, so that the template's own text can be told from them.

    Every control token begins with one of a few characters ("<" in DeepSeek's). In the contents, each of these
    characters is replaced by a stand-in that occurs nowhere in them. Whatever the template then does with a content
    (cut, strip, join), no control token in the rendered text can begin inside it. `encode` splits off control tokens
    first; then it turns stand-ins back into the original characters.

    An assistant's own <think> tags stay as they are: templates look for them, and the message is the model's own turn.
    """

    def __init__(self, first_characters: Collection[str], contents: Iterable[str]) -> None:
        taken = set().union(*contents)
        free = (chr(code) for code in STAND_INS if chr(code) not in taken)
        self._stand_ins = dict(zip(first_characters, free, strict=False))
        if len(self._stand_ins) < len(first_characters):
            raise InvalidRequest("messages use up every private use character of plane 15", field="messages")
        self._tags = re.compile(f"({re.escape(THINK_OPEN)}|{re.escape(THINK_CLOSE)})")

    def apply(self, content: str, *, own_words: bool) -> str:
        """The content as the template may see it. `own_words`: the message is the assistant's, whose <think> tags
        stay.
        """
        if not own_words:
            return self._disguise(content)
        pieces = self._tags.split(content)
        return "".join(piece if index % 2 else self._disguise(piece) for index, piece in enumerate(pieces))

    def encode(self, rendered: str, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the rendered text; control tokens only where the template wrote them."""
        return tokenizer.encode(rendered, self._reveal)

    def _disguise(self, text: str) -> str:
        for character, stand_in in self._stand_ins.items():
            text = text.replace(character, stand_in)
        return text

    def _reveal(self, text: str) -> str:
        for character, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, character)
        return text

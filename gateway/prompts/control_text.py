"""Keeping control tokens out of clients' text: a defence against prompt injection through the chat template."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast

from gateway.prompts.tokenizer import Tokenizer
from gateway.text.reasoning import THINK_CLOSE, THINK_OPEN
from mesh.errors import InvalidRequest

# Symbols of Sutton SignWriting, which hardly any text has. They are printable and no letters, as "<" is, so that
# templates treat them alike.
STAND_INS = range(0x1D800, 0x1DA00)

ValueT = TypeVar("ValueT")


class ControlTextShield:
    """Disguises what clients wrote while the template runs, so that the template's own text can be told from it.

    Every control token begins with one of a few characters ("<" in DeepSeek's). In clients' text, each of these
    characters is replaced by a stand-in that occurs nowhere in it. Whatever the template then does with the text (cut,
    strip, join), no control token in the rendered text can begin inside it. `encode` splits off control tokens first;
    then it turns stand-ins back into the original characters.
    """

    def __init__(self, first_characters: Collection[str], given: object) -> None:
        """given: a tree that holds all text of the client, as `strings_in` reads it."""
        taken = set[str]().union(*strings_in(given))
        # A character that is not in the text needs no stand-in; most chats need none at all.
        needed = [character for character in first_characters if character in taken]
        free = (chr(code) for code in STAND_INS if chr(code) not in taken)
        self._stand_ins = dict(zip(needed, free, strict=False))
        if len(self._stand_ins) < len(needed):
            raise InvalidRequest("messages use up every symbol of SignWriting: leave one out", field="messages")
        self._tags = re.compile(f"({re.escape(THINK_OPEN)}|{re.escape(THINK_CLOSE)})")

    def disguised(self, given: ValueT) -> ValueT:
        """The tree with every string in it disguised: values, keys, and the fields of dataclasses."""
        return cast(ValueT, self._disguised(given)) if self._stand_ins else given

    def own_words(self, text: str) -> str:
        """An assistant's text, disguised except for its <think> tags: templates look for them, and the message is the
        model's own turn.
        """
        pieces = self._tags.split(text)
        return "".join(piece if index % 2 else self.disguised(piece) for index, piece in enumerate(pieces))

    def encode(self, rendered: str, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the rendered text; control tokens only where the template wrote them."""
        return tokenizer.encode(rendered, self._reveal)

    def _disguised(self, value: Any) -> Any:
        if isinstance(value, str):
            for character, stand_in in self._stand_ins.items():
                value = value.replace(character, stand_in)
            return value
        if isinstance(value, Mapping):
            return {self._disguised(key): self._disguised(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._disguised(each) for each in value]
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(*[self._disguised(getattr(value, name)) for name in _field_names(type(value))])
        return value

    def _reveal(self, text: str) -> str:
        for character, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, character)
        return text


def strings_in(tree: object) -> Iterator[str]:
    """Every string of a tree of JSON values and dataclasses, keys too, in no order."""
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif is_dataclass(value) and not isinstance(value, type):
            waiting += [getattr(value, name) for name in _field_names(type(value))]


@cache
def _field_names(kind: type) -> Sequence[str]:
    return [each.name for each in fields(kind)]

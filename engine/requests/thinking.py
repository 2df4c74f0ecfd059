"""Whether a request's model thinks: told by the tokens that open and close its thinking."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mesh.errors import CheckpointError, ConfigError
from mesh.text.tokenizer_file import read_tokenizer, tokenizer_path

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ThinkTokens:
    """Token ids."""

    open: int
    close: int


class ThinkingPhase:
    """Whether one request thinks. Its list of tokens only grows, and each is looked at once."""

    __slots__ = ("_read", "_thinks", "_tokens")

    def __init__(self, tokens: ThinkTokens) -> None:
        self._tokens = tokens
        self._read = 0
        self._thinks = False

    def after(self, token_ids: Sequence[int]) -> bool:
        """Whether the token after these is a thought."""
        for index in range(self._read, len(token_ids)):
            if token_ids[index] == self._tokens.open:
                self._thinks = True
            elif token_ids[index] == self._tokens.close:
                self._thinks = False
        self._read = len(token_ids)
        return self._thinks


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_think_tokens(model_dir: Path) -> ThinkTokens:
    """From the checkpoint's tokenizer. Raises CheckpointError if it has no such tokens."""
    try:
        added = msgspec.json.decode(read_tokenizer(model_dir), type=_Tokenizer).added_tokens
    except (ConfigError, msgspec.DecodeError) as error:
        raise CheckpointError(f"relaxed acceptance needs the tokens {OPEN} and {CLOSE}: {error}") from error
    ids = {token.content: token.id for token in added}
    if OPEN not in ids or CLOSE not in ids:
        raise CheckpointError(
            f"{tokenizer_path(model_dir)} has no tokens {OPEN} and {CLOSE}, which tell relaxed acceptance when a model"
            " thinks: set engine.drafts.acceptance=strict"
        )
    return ThinkTokens(ids[OPEN], ids[CLOSE])

"""Streams token ids to text, in whole characters only."""

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """Decodes one answer of a byte-level vocabulary in one pass, O(1) per token.

    A token is a run of bytes and may end inside a character; those bytes wait for the token that completes it. Bytes
    that can never become a character read as U+FFFD, as they do if the tokenizer decodes the whole answer at once.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """What is left of an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)

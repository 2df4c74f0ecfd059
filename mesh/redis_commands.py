"""Commands of Redis, as words or in wire format."""

from collections.abc import Sequence
from typing import TypeAlias

# The words of a command, or the packed result of `PackedKeys.after`.
Command: TypeAlias = tuple[bytes, ...] | bytes


class PackedKeys:
    """Keys that end several commands, packed only once. There must be at least one, and all must have the same length.

    hiredis packs word by word, and takes eight times as long for 64 of them.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        (length,) = set(map(len, keys))
        before = b"$%d\r\n" % length
        self._number = len(keys)
        self._packed = before + (b"\r\n" + before).join(keys) + b"\r\n"

    def after(self, *words: bytes) -> Command:
        """The command that consists of these words, followed by the keys."""
        head = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
        return b"*%d\r\n%b%b" % (len(words) + self._number, head, self._packed)

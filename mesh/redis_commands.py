"""Commands of Redis, as words or as they are sent."""

from collections.abc import Sequence
from typing import TypeAlias

# Its words, or what `PackedKeys.after` makes.
Command: TypeAlias = tuple[bytes, ...] | bytes


class PackedKeys:
    """The last words of commands, packed once for all of them: keys of one length, and at least one.

    hiredis packs word by word, and takes eight times as long for 64 of them.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        (length,) = set(map(len, keys))
        before = b"$%d\r\n" % length
        self._number = len(keys)
        self._packed = before + (b"\r\n" + before).join(keys) + b"\r\n"

    def after(self, *words: bytes) -> Command:
        """The command of these words and the keys."""
        head = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
        return b"*%d\r\n%b%b" % (len(words) + self._number, head, self._packed)

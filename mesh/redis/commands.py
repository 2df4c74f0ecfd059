"""What is asked of Redis, and how it fails."""

import hashlib
from typing import TypeAlias

# The words of a command.
Command: TypeAlias = tuple[bytes, ...]


class Script:
    """A Lua script that is called by its digest; Redis gets its text only if it does not know the digest."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


class RedisFailure(Exception):
    """Redis did not answer."""


class RedisRefusal(RedisFailure):
    """Redis answered with an error."""


class UnknownScript(RedisRefusal):
    """Redis does not know the digest of a script."""

"""Where ranks of a worker that lie on several hosts leave how they are reached, and learn it of others."""

import asyncio


class Rendezvous:
    """Keys and values, for as long as the ranks load."""

    def __init__(self) -> None:
        self._values: dict[str, asyncio.Future[bytes]] = {}

    def publish(self, key: str, value: bytes) -> None:
        self._value(key).set_result(value)

    async def look_up(self, key: str) -> bytes:
        """Return when the key has been published."""
        return await asyncio.shield(self._value(key))

    def _value(self, key: str) -> asyncio.Future[bytes]:
        return self._values.setdefault(key, asyncio.get_running_loop().create_future())

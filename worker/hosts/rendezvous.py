"""Where ranks on several hosts publish their addresses and look up each other's."""

import asyncio


class HostsRendezvous:
    """Keys and values, kept while the ranks load."""

    def __init__(self) -> None:
        self._values: dict[str, asyncio.Future[bytes]] = {}

    def publish(self, key: str, value: bytes) -> None:
        self._value(key).set_result(value)

    async def look_up(self, key: str) -> bytes:
        """The key's value, once it has been published."""
        return await asyncio.shield(self._value(key))

    def _value(self, key: str) -> asyncio.Future[bytes]:
        return self._values.setdefault(key, asyncio.get_running_loop().create_future())

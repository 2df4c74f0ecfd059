"""Keeps responses in Redis, so that any gateway can continue from them.

The key is the SHA-256 of the tenant's name and the response's id, so another tenant cannot find it. A record holds the
whole conversation up to the response's end, so no earlier record is needed, and it expires by itself.
"""

import logging
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.config import ResponsesConfig
from gateway.responses.items import InputItem
from mesh.errors import ResponsesUnavailable
from mesh.observe.metrics import GATEWAY_RESPONSE_STORE_FAILURES
from mesh.redis.commands import Command
from mesh.redis.link import RedisLink

PREFIX = b"deepmesh:response:"
_log = logging.getLogger("deepmesh.gateway")


class Conversation(Struct, frozen=True):
    """A response with the conversation before it."""

    # The items of the earlier conversation, of the request, and of the answer, in this order.
    items: list[InputItem]
    # The response, as its client received it.
    response: Raw


class ResponseStore:
    """Every call takes one round trip and may raise ResponsesUnavailable."""

    def __init__(self, config: ResponsesConfig) -> None:
        self._link = RedisLink(config, "the store of responses", ResponsesUnavailable, GATEWAY_RESPONSE_STORE_FAILURES)
        self._milliseconds = str(max(1, round(1000 * config.seconds))).encode()
        self.largest = config.bytes

    async def find(self, tenant: str, response_id: str) -> Conversation | None:
        """None if the tenant has no such response, or had one that expired."""
        kept = await self._ask((b"GET", _key(tenant, response_id)))
        try:
            return None if kept is None else msgspec.json.decode(kept, type=Conversation)
        except (ValueError, TypeError, RecursionError) as error:
            # A gateway of another version may have written it. The decoding error may quote the tenant's data, so it is
            # not reported.
            raise ResponsesUnavailable("the store of responses has this one in a form that is unknown here") from error

    async def keep(self, tenant: str, response_id: str, conversation: Conversation) -> None:
        kept = msgspec.json.encode(conversation)
        await self._ask((b"SET", _key(tenant, response_id), kept, b"PX", self._milliseconds))

    async def forget(self, tenant: str, response_id: str) -> bool:
        """Delete the response. Returns whether there was one."""
        return bool(await self._ask((b"UNLINK", _key(tenant, response_id))))

    async def close(self) -> None:
        await self._link.close()

    async def _ask(self, command: Command) -> Any:
        try:
            [answer] = await self._link.ask(command)
        except ResponsesUnavailable as error:
            # The address of Redis and its messages are for the operator, not for clients.
            _log.warning("a response was neither stored nor found: %s", error)
            raise ResponsesUnavailable("the store of responses does not answer: retry") from error
        return answer


def _key(tenant: str, response_id: str) -> bytes:
    # The digest has a fixed length, so no two pairs give the same text.
    named = sha256(tenant.encode()).digest() + response_id.encode()
    return PREFIX + sha256(named).hexdigest().encode()

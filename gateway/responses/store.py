"""Responses that are kept in Redis, so that any gateway goes on from them.

Each stands under the SHA-256 of its tenant's name and its id: with another's key it is simply not there. It holds the
whole conversation up to its end, so that it needs no earlier one, and expires by itself.
"""

import logging
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw, Struct

from gateway.config import ResponsesConfig
from gateway.responses.items import InputItem
from mesh.errors import ResponsesUnavailable
from mesh.metrics import GATEWAY_RESPONSE_STORE_FAILURES
from mesh.redis_commands import Command
from mesh.redis_link import RedisLink

PREFIX = b"deepmesh:response:"
_log = logging.getLogger("deepmesh.gateway")


class Conversation(Struct, frozen=True):
    """A response with all that came before it."""

    # Those of the request, behind those that it went on from, and the answer's.
    items: list[InputItem]
    # As its client read it.
    response: Raw


class ResponseStore:
    """Every call may raise ResponsesUnavailable, and takes one round trip."""

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
            # Another version of a gateway may have written it. What it says is the tenant's alone.
            raise ResponsesUnavailable("the store of responses has this one in a form that is unknown here") from error

    async def keep(self, tenant: str, response_id: str, conversation: Conversation) -> None:
        kept = msgspec.json.encode(conversation)
        await self._ask((b"SET", _key(tenant, response_id), kept, b"PX", self._milliseconds))

    async def forget(self, tenant: str, response_id: str) -> bool:
        """Whether there was such a response."""
        return bool(await self._ask((b"UNLINK", _key(tenant, response_id))))

    async def close(self) -> None:
        self._link.close()

    async def _ask(self, command: Command) -> Any:
        try:
            [answer] = await self._link.ask(command)
        except ResponsesUnavailable as error:
            # Where Redis is, and what it says, is for the operator and not for clients.
            _log.warning("a response was neither stored nor found: %s", error)
            raise ResponsesUnavailable("the store of responses does not answer: retry") from error
        return answer


def _key(tenant: str, response_id: str) -> bytes:
    # No two pairs give the same text: a digest has a length of its own.
    named = sha256(tenant.encode()).digest() + response_id.encode()
    return PREFIX + sha256(named).hexdigest().encode()

"""API keys: who calls, whose cache they share, and how many generations they may have at once."""

import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from gateway.config import ApiKeyConfig
from gateway.processes.ledger import Ledger
from mesh.domain.shares import Share
from mesh.errors import Overloaded, Unauthenticated

SCHEME = "bearer"
RETRY_AFTER_MS = 1000


class Tenant:
    """The holder of one key. If there are no keys, one tenant stands for all clients."""

    def __init__(
        self,
        name: str,
        cache_salt: bytes,
        weight: float = 1.0,
        max_concurrent: int | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """ledger: counts the tenant's generations; without one they are not counted."""
        self.name = name
        self.cache_salt = cache_salt
        self.weight = weight
        self._max_concurrent = max_concurrent
        self._ledger = ledger
        self._live = None if ledger is None else ledger.live(name)

    @property
    def live(self) -> int:
        return 0 if self._live is None else self._live.total

    def share(self, priority: int) -> Share:
        """What decides this request's place among those of all tenants."""
        return Share(self.name, self.weight, priority)

    def chain_root(self, cache_salt: str | None) -> bytes:
        """Root of the hash chains of a request; `cache_salt` is the client's own.

        It is keyed with the tenant's secret, so that no client can name another tenant's blocks.
        """
        if cache_salt is None:
            return self.cache_salt
        return hmac.digest(self.cache_salt, cache_salt.encode(), "sha256")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count one generation while the block lasts. Raises Overloaded if the tenant has as many as it may."""
        if self._live is None or self._ledger is None:
            yield
            return
        with self._ledger.held():
            if self._max_concurrent is not None and self.live >= self._max_concurrent:
                raise Overloaded(
                    f"API key {self.name!r} has {self.live} generations running, its limit: wait for one to end",
                    retry_after_ms=RETRY_AFTER_MS,
                )
            self._live.add(1)
        try:
            yield
        finally:
            self._live.add(-1)


class Tenants:
    def __init__(self, keys: Sequence[ApiKeyConfig], ledger: Ledger) -> None:
        self._everyone = Tenant("everyone", b"")
        self._by_key = [
            (
                key.digest,
                Tenant(
                    key.name,
                    (key.name if key.cache_salt is None else key.cache_salt).encode(),
                    key.weight,
                    key.max_concurrent,
                    ledger,
                ),
            )
            for key in keys
        ]

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization: Bearer KEY`. Raises Unauthenticated for an unknown or missing key."""
        if not self._by_key:
            return self._everyone
        scheme, _, credential = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or not credential:
            raise Unauthenticated("an API key is required: send 'Authorization: Bearer KEY'")
        given = sha256(credential.strip().encode()).digest()
        # Every key is compared, each in constant time, so that timing reveals nothing.
        found = [tenant for key, tenant in self._by_key if hmac.compare_digest(key, given)]
        if not found:
            raise Unauthenticated("that API key is not known here")
        return found[0]

"""How many requests and tokens a tenant may ask for in a minute. Pure: time is passed in, in seconds."""

import math
from collections.abc import Sequence

from gateway.config import ApiKeyConfig
from gateway.processes.ledger import Ledger
from mesh.errors import Overloaded

MINUTE_SECONDS = 60.0


class Allowance:
    """An amount per minute, which may be used all at once. Use beyond it becomes a debt that waiting pays off."""

    def __init__(self, per_minute: int, state: "memoryview[float]") -> None:
        """state: [what is left, when it was last filled]; it lives in memory that other processes may share."""
        self._per_minute = per_minute
        self._state = state

    def wait_seconds(self, now: float) -> float:
        """Seconds until one unit may be used; 0 if it may be used now."""
        self._fill(now)
        return max(0.0, (1 - self._state[0]) * MINUTE_SECONDS / self._per_minute)

    def use(self, amount: int, now: float) -> None:
        self._fill(now)
        self._state[0] -= amount

    def _fill(self, now: float) -> None:
        left, filled_at = self._state
        # Another process's clock may be slightly ahead, so the difference may be negative.
        gained = max(0.0, now - filled_at) * self._per_minute / MINUTE_SECONDS
        self._state[0], self._state[1] = min(float(self._per_minute), left + gained), max(now, filled_at)


class Quotas:
    """The allowances of all tenants, by key name. A tenant without a configured limit has none here."""

    def __init__(self, keys: Sequence[ApiKeyConfig], ledger: Ledger) -> None:
        self._ledger = ledger
        self._requests = {
            key.name: Allowance(each, ledger.allowance(key.name, "requests"))
            for key in keys
            if (each := key.requests_per_minute) is not None
        }
        self._tokens = {
            key.name: Allowance(each, ledger.allowance(key.name, "tokens"))
            for key in keys
            if (each := key.tokens_per_minute) is not None
        }

    def admit(self, tenant: str, now: float) -> None:
        """Count one request. Raises Overloaded, with the time to wait, if the tenant has used up an allowance."""
        with self._ledger.held():
            self._admit(tenant, now)

    def _admit(self, tenant: str, now: float) -> None:
        for allowances, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait = allowances[tenant].wait_seconds(now) if tenant in allowances else 0.0
            if wait > 0:
                raise Overloaded(
                    f"API key {tenant!r} has used its {unit} of this minute: retry in {wait:.1f} s",
                    retry_after_ms=math.ceil(1000 * wait),
                )
        if tenant in self._requests:
            self._requests[tenant].use(1, now)

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """Count the tokens of a prompt once it is admitted, or those of an answer once it has ended."""
        if tenant in self._tokens:
            with self._ledger.held():
                self._tokens[tenant].use(tokens, now)

"""What became of one generation: counted, and logged if an access log is kept."""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.live import LiveGeneration
from gateway.tenants import Tenant
from mesh.errors import MeshError
from mesh.metrics import GATEWAY_ACCEPTED, GATEWAY_REFUSALS
from mesh.observe import access_log


class Account:
    """`with Account(tenant, api, clock) as account:` around a generation, which `accept` names once it is placed."""

    def __init__(self, tenant: Tenant, api: str, clock: Callable[[], float]) -> None:
        self._tenant = tenant.name
        self._api = api
        self._clock = clock
        self._began_at = clock()
        self._live: LiveGeneration | None = None

    def __enter__(self) -> Self:
        return self

    def accept(self, live: LiveGeneration) -> LiveGeneration:
        self._live = live
        GATEWAY_ACCEPTED.labels(self._tenant, self._api).inc()
        return live

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = "finished" if self._live is not None and self._live.finished else "cancelled"
        if isinstance(error, MeshError):
            outcome = error.reason.lower()
            if self._live is None:
                GATEWAY_REFUSALS.labels(self._tenant, self._api, outcome).inc()
        if access_log.isEnabledFor(logging.INFO):
            access_log.info("generation", extra={"fields": self._fields(outcome)})

    def _fields(self, outcome: str) -> dict[str, object]:
        fields: dict[str, object] = {"tenant": self._tenant, "api": self._api, "outcome": outcome}
        if (live := self._live) is not None:
            generation = live.generation
            fields |= {
                # A sibling has an id of its own.
                "request_id": generation.request.request_id,
                "model": generation.model,
                "prompt_tokens": len(generation.request.token_ids),
                "cached_tokens": generation.cached_tokens,
                "output_tokens": generation.received_tokens,
            }
            if live.first_token_at is not None:
                fields["ttft_ms"] = round(1000 * (live.first_token_at - self._began_at), 1)
        fields["ms"] = round(1000 * (self._clock() - self._began_at), 1)
        return fields

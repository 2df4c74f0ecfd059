"""What became of one generation: counted, and logged if an access log is kept."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.answers import Answer, RecentAnswers
from gateway.live import LiveGeneration
from gateway.tenants import Tenant
from mesh.errors import MeshError
from mesh.metrics import GATEWAY_ACCEPTED, GATEWAY_REFUSALS
from mesh.observe import access_log


class Account:
    """`with Account(...) as account:` surrounds one generation; call `accept` with it once it is placed.

    The block's end adds the outcome to `answers`.
    """

    def __init__(self, tenant: Tenant, api: str, clock: Callable[[], float], answers: RecentAnswers) -> None:
        self._tenant = tenant.name
        self._api = api
        self._clock = clock
        self._answers = answers
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
        self._answers.add(self._answer(outcome))
        if access_log.isEnabledFor(logging.INFO):
            access_log.info("generation", extra={"fields": self._fields(outcome)})

    def _answer(self, outcome: str) -> Answer:
        live, now = self._live, self._clock()
        if live is None:
            return Answer(time.time(), None, None, 0, 0, 0, outcome)
        generation, first = live.generation, live.first_token_at
        tokens = generation.generated_tokens
        return Answer(
            ended_at=time.time(),
            ttft_ms=None if first is None else round(1000 * (first - self._began_at), 1),
            tpot_ms=None if first is None or tokens < 2 else round(1000 * (now - first) / (tokens - 1), 2),
            prompt_tokens=len(generation.request.token_ids),
            cached_tokens=generation.cached_tokens,
            output_tokens=tokens,
            outcome=outcome,
        )

    def _fields(self, outcome: str) -> dict[str, object]:
        fields: dict[str, object] = {"tenant": self._tenant, "api": self._api, "outcome": outcome}
        if (live := self._live) is not None:
            generation = live.generation
            fields |= {
                # A sibling's id differs from that of the request that it belongs to.
                "request_id": generation.request.request_id,
                "model": generation.model,
                "prompt_tokens": len(generation.request.token_ids),
                "cached_tokens": generation.cached_tokens,
                "output_tokens": generation.generated_tokens,
            }
            if live.first_token_at is not None:
                fields["ttft_ms"] = round(1000 * (live.first_token_at - self._began_at), 1)
        fields["ms"] = round(1000 * (self._clock() - self._began_at), 1)
        return fields

"""What became of each generation: counted, kept for the page that operators watch, and logged if a log is kept."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from gateway.live import LiveGeneration
from gateway.prepared import Prepared
from gateway.tenants import Tenant
from mesh.errors import MeshError
from mesh.observe.logs import access_log
from mesh.observe.metrics import GATEWAY_ACCEPTED, GATEWAY_REFUSALS, GATEWAY_REQUESTS

KEPT = 2048


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """How one generation went. Times are in milliseconds; None if the generation had no first, or no second, token."""

    # Seconds since the epoch.
    ended_at: float
    ttft_ms: float | None
    tpot_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str


class RecentAnswers:
    """A ring of the last answers. Readers name a position in the count of all answers ever added."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=KEPT)
        # Answers ever added, including those that the ring has dropped.
        self.count = 0

    def add(self, answer: Answer) -> None:
        self._answers.append(answer)
        self.count += 1

    def after(self, count: int) -> Sequence[Answer]:
        """The answers added after the first `count` ones, except those that the ring has dropped."""
        new = min(self.count - count, len(self._answers))
        return list(self._answers)[len(self._answers) - new :]


class Account:
    """`with Account(...) as account:` surrounds one generation; call `dispatch` before it is placed, and `accept` once
    it is.

    The block's end settles how the generation ended, and adds it to `answers`.
    """

    def __init__(self, tenant: Tenant, api: str, clock: Callable[[], float], answers: RecentAnswers) -> None:
        self._tenant = tenant.name
        self._api = api
        self._clock = clock
        self._answers = answers
        self._began_at = clock()
        # The model that is asked; None before the request is understood.
        self._model: str | None = None
        self._live: LiveGeneration | None = None

    def __enter__(self) -> Self:
        return self

    def dispatch(self, prepared: Prepared) -> Prepared:
        """From here on the generation counts among those of its model, even if it is refused."""
        self._model = prepared.model
        return prepared

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
        if self._model is not None:
            GATEWAY_REQUESTS.labels(self._model, self._api, outcome).inc()
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

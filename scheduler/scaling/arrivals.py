"""How fast requests arrive, per model: smoothed rates. `clock` is monotonic, in seconds."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

MAX_MODELS = 1024


@dataclass(frozen=True, slots=True)
class Demand:
    """The load that clients put on a model; rates are per second."""

    # Prompt tokens that are not cached.
    prompt_tokens: float = 0.0
    # Requests that found no worker or no room.
    refused_requests: float = 0.0
    # Mean over all requests.
    mean_prompt_tokens: float = 0.0


class Rate:
    """Exponentially smoothed rate of events, each with an amount."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._value = 0.0
        self._as_of = 0.0

    def add(self, amount: float, now: float) -> None:
        self._value, self._as_of = self.at(now) + amount / self._seconds, now

    def at(self, now: float) -> float:
        return self._value * exp((self._as_of - now) / self._seconds)


class _Model:
    def __init__(self, seconds: float) -> None:
        self.computed, self.refused = Rate(seconds), Rate(seconds)
        self.prompts, self.requests = Rate(seconds), Rate(seconds)


class Arrivals:
    """Rates of requests that were placed or refused, averaged over about `seconds`."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._models: dict[str, _Model] = {}

    def placed(self, model: str, prompt_tokens: int, uncached_tokens: int) -> None:
        self._count(model, prompt_tokens, uncached_tokens, refused=False)

    def refused(self, model: str, prompt_tokens: int) -> None:
        self._count(model, prompt_tokens, prompt_tokens, refused=True)

    def demand(self, model: str) -> Demand:
        found, now = self._models.get(model), self._clock()
        if found is None:
            return Demand()
        requests = found.requests.at(now)
        mean = found.prompts.at(now) / requests if requests else 0.0
        return Demand(found.computed.at(now), found.refused.at(now), mean)

    def models(self) -> frozenset[str]:
        """The models that requests have named."""
        return frozenset(self._models)

    def _count(self, model: str, prompt_tokens: int, uncached_tokens: int, refused: bool) -> None:
        if model not in self._models and len(self._models) >= MAX_MODELS:
            return
        rates, now = self._models.setdefault(model, _Model(self._seconds)), self._clock()
        rates.requests.add(1, now)
        rates.prompts.add(prompt_tokens, now)
        rates.computed.add(uncached_tokens, now)
        rates.refused.add(float(refused), now)

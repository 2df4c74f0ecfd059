"""Requests of a workload, in the order of their arrivals."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, repeat

import numpy as np

from mesh.domain.shares import ONE_TENANT, Share
from sim.arrivals import arrival_times
from sim.device import LONGEST_OUTPUT
from sim.workload import LengthConfig, WorkloadConfig

# Exponent of Zipf's law: how steeply the popularity of shared prefixes falls with their rank.
ZIPF = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request before it is sent."""

    seconds: float
    token_ids: Sequence[int]
    output_tokens: int
    max_tokens: int
    share: Share = ONE_TENANT
    # Called with the time at which this request ended; returns the session's next request, if there is one.
    ended: Callable[[float], "Asked | None"] | None = None


class Prompts:
    """Token ids: fresh ones, and texts that several prompts share.

    Only whether texts are equal matters to the simulation. A fresh text therefore differs from all others in its first
    token alone: a block's hash covers all tokens up to its end.
    """

    def __init__(self) -> None:
        self._firsts = count(LONGEST_OUTPUT + 1)

    def fresh(self, tokens: int) -> list[int]:
        return [next(self._firsts), *repeat(LONGEST_OUTPUT, tokens - 1)] if tokens > 0 else []


def length(config: LengthConfig, generator: np.random.Generator) -> int:
    """Draw one length in tokens."""
    match config.kind:
        case "fixed":
            drawn = config.mean
        case "uniform":
            drawn = generator.uniform(config.mean * (1 - config.spread), config.mean * (1 + config.spread))
        case "exponential":
            drawn = generator.exponential(config.mean)
        case "lognormal":
            drawn = generator.lognormal(_lognormal_location(config.mean, config.spread), config.spread)
        case "quantiles":
            place = generator.random() * (len(config.quantiles) - 1)
            drawn = np.interp(place, range(len(config.quantiles)), config.quantiles)
    return int(min(config.most, max(config.least, round(drawn))))


@cache
def _lognormal_location(mean: float, spread: float) -> float:
    return float(np.log(mean) - spread**2 / 2)


def with_length(token_ids: list[int], output_tokens: int) -> list[int]:
    """The prompt, changed so that its answer has `output_tokens` tokens (see sim.device)."""
    return [*token_ids[:-1], output_tokens]


class _Choice:
    """Draws a number below `len(weights)`, each as often as its weight says.

    The draws equal those of `Generator.choice`, which is slower: it checks and adds up the weights at every draw.
    """

    def __init__(self, weights: np.ndarray) -> None:
        shares = (weights / weights.sum()).cumsum()
        self._upper_bounds: list[float] = (shares / shares[-1]).tolist()

    def draw(self, generator: np.random.Generator) -> int:
        return bisect_right(self._upper_bounds, generator.random())


class SyntheticWorkload:
    """Draws arrivals, lengths and choices, each from a stream of its own, so that changing one changes no other."""

    def __init__(self, config: WorkloadConfig) -> None:
        # The third stream, which once drew tokens, is unused. It stays so that each seed's other draws do not change.
        arrivals, lengths, _, choices = np.random.SeedSequence(config.seed).spawn(4)
        self._config = config
        self._arrivals = np.random.default_rng(arrivals)
        self._lengths = np.random.default_rng(lengths)
        self._choices = np.random.default_rng(choices)
        self._prompts = Prompts()
        self._tenants = [Share(tenant.name, tenant.weight) for tenant in config.tenants] or [ONE_TENANT]
        shares = np.array([tenant.share for tenant in config.tenants] or [1.0])
        self._shares = _Choice(shares)
        self._popularity = _Choice(np.arange(1, config.prefixes + 1, dtype=float) ** -ZIPF) if config.prefixes else None
        self._prefixes: dict[tuple[str, int], list[int]] = {}

    def __iter__(self) -> Iterator[Asked]:
        config = self._config
        assert config.arrivals is not None
        for seconds in arrival_times(config.arrivals, config.seconds, self._arrivals):
            yield self._first(seconds)

    def _first(self, seconds: float) -> Asked:
        tenant = self._tenants[self._shares.draw(self._choices)]
        tokens = length(self._config.prompt, self._lengths)
        prefix = self._prefix(tenant.tenant)
        prompt = prefix + self._prompts.fresh(max(2, tokens - len(prefix)))
        return self._turn(seconds, prompt, tenant, self._config.turns - 1)

    def _turn(self, seconds: float, token_ids: list[int], tenant: Share, turns_left: int) -> Asked:
        """token_ids: this turn's whole prompt. Its last token is set to the length of the answer (see sim.device)."""
        output = min(length(self._config.output, self._lengths), LONGEST_OUTPUT - 1)
        token_ids[-1] = output

        def ended(now: float) -> Asked | None:
            if not turns_left:
                return None
            answer = list(range(output - 1, -1, -1))
            added = self._prompts.fresh(max(2, length(self._config.prompt, self._lengths)))
            pause = float(self._lengths.exponential(self._config.think_seconds)) if self._config.think_seconds else 0.0
            return self._turn(now + pause, [*token_ids, *answer, *added], tenant, turns_left - 1)

        asked = self._config.max_tokens or output
        return Asked(seconds, token_ids, min(output, asked), asked, tenant, ended if turns_left else None)

    def _prefix(self, tenant: str) -> list[int]:
        if self._popularity is None:
            return []
        number = self._popularity.draw(self._choices)
        if (tenant, number) not in self._prefixes:
            self._prefixes[tenant, number] = self._prompts.fresh(self._config.prefix_tokens)
        return self._prefixes[tenant, number]

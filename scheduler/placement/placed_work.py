"""The work that a placement brings to the ranks that it names, and the latest ends of the requests placed on a rank."""

from bisect import bisect_left, insort

import msgspec

from mesh.domain.placement import PlacementKey
from mesh.tails import is_tail
from scheduler.placement.candidates import PlacementRequest, Unreported, blocks
from scheduler.placement.constants import Constants
from scheduler.placement.terms import Terms


class PlacedWork(msgspec.Struct, frozen=True, gc=False):
    """The work that a placement brings to one rank. Times are predictions on the clock of `Candidates.now`."""

    load: Unreported
    # How long the rank computes the prompt, and when the prompt arrives; 0 means at once.
    prompt_seconds: float = 0.0
    comes_at: float = 0.0
    # When the prompt begins on a rank whose prompts begin together with other ranks'; None if it waits for none of
    # them.
    begins_at: float | None = 0.0
    # If the rank decodes: when the request ends if it reaches its token limit.
    ends_at: float | None = None


def placed_work(
    request: PlacementRequest, chosen: Terms, now: float, constants: Constants
) -> dict[tuple[str, int], PlacedWork]:
    """The work that the request brings to the rank of each chosen worker."""
    taken, decode = blocks(request.query.prompt_tokens + 1), (chosen.worker_id, chosen.rank or 0)
    lacking, prompt_seconds = taken - chosen.held_blocks, chosen.prompt_ms / 1000
    ends_ms = chosen.ttft_ms - constants.costs.request_ms + (request.query.max_tokens - 1) * chosen.tpot_ms
    if chosen.prefill_worker_id is None:
        load = Unreported(1, chosen.uncached_tokens, lacking)
        alone = is_tail(chosen.uncached_tokens, chosen.cached_blocks)
        begins_at = None if alone else now + chosen.wait_ms / 1000
        return {decode: PlacedWork(load, prompt_seconds, begins_at=begins_at, ends_at=now + ends_ms / 1000)}
    # With a prefill worker, the second token waits on average half a step for the current step to end.
    ends_ms += chosen.tpot_ms / 2
    load = Unreported(1, chosen.uncached_tokens, taken)
    begins_ms = chosen.ttft_ms - chosen.prompt_ms - constants.costs.request_ms - constants.costs.handover_ms / 2
    return {
        decode: PlacedWork(Unreported(1, 0, lacking), ends_at=now + ends_ms / 1000),
        (chosen.prefill_worker_id, chosen.prefill_rank or 0): PlacedWork(
            load, prompt_seconds, now + chosen.wait_ms / 1000, now + begins_ms / 1000
        ),
    }


class Ends:
    """Ends in seconds on the writer's clock. Requests that have ended must be removed."""

    def __init__(self) -> None:
        self._by_key: dict[PlacementKey, float] = {}
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, key: PlacementKey, ends_at: float) -> None:
        self.remove(key)
        self._by_key[key] = ends_at
        insort(self._ordered, ends_at)

    def remove(self, key: PlacementKey) -> bool:
        """False if it was not there."""
        ends_at = self._by_key.pop(key, None)
        if ends_at is None:
            return False
        del self._ordered[bisect_left(self._ordered, ends_at)]
        return True

    def first(self, count: int) -> list[float]:
        """The earliest ends, ascending."""
        return self._ordered[:count]

    def forget_before(self, time: float) -> None:
        """Remove the requests that must have ended before `time`."""
        if self._ordered and self._ordered[0] < time:
            self._by_key = {key: ends_at for key, ends_at in self._by_key.items() if ends_at >= time}
            self._ordered = sorted(self._by_key.values())

"""The work that a placement brings to the ranks that it names, and when answers placed on a rank end."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain

import msgspec

from mesh.domain.placement import PlacementKey
from mesh.tails import is_tail
from scheduler.placement.candidates import PlacementRequest, Unreported, blocks
from scheduler.placement.constants import Constants
from scheduler.placement.growth import PlacedAnswers, Times
from scheduler.placement.terms import Terms


class Answer(msgspec.Struct, frozen=True, gc=False):
    """When it begins, when it ends if it has the mean length, and when it ends if it reaches its token limit."""

    begins_at: float
    expected_at: float
    latest_at: float


class PlacedWork(msgspec.Struct, frozen=True, gc=False):
    """The work that a placement brings to one rank. Times are predictions on the clock of `Candidates.now`."""

    load: Unreported
    # How long the rank computes the prompt, and when the prompt arrives; 0 means at once.
    prompt_seconds: float = 0.0
    comes_at: float = 0.0
    # When the prompt begins on a rank whose prompts begin together with other ranks'; None if it waits for none of
    # them.
    begins_at: float | None = 0.0
    # If the rank decodes.
    answer: Answer | None = None


def placed_work(
    request: PlacementRequest, chosen: Terms, now: float, constants: Constants
) -> dict[tuple[str, int], PlacedWork]:
    """The work that the request brings to the rank of each chosen worker."""
    taken, decode = blocks(request.query.prompt_tokens + 1), (chosen.worker_id, chosen.rank or 0)
    lacking, prompt_seconds = taken - chosen.held_blocks, chosen.prompt_ms / 1000
    # With a prefill worker, the second token waits on average half a step for the current step to end.
    joining_ms = 0.0 if chosen.prefill_worker_id is None else chosen.tpot_ms / 2
    first_at = now + (chosen.ttft_ms - constants.costs.request_ms + joining_ms) / 1000
    limit = request.query.max_tokens
    mean = min(request.mean_output_tokens or constants.config.mean_output_tokens, limit)
    answer = Answer(first_at, *(first_at + (tokens - 1) * chosen.tpot_ms / 1000 for tokens in (mean, limit)))
    if chosen.prefill_worker_id is None:
        load = Unreported(1, chosen.uncached_tokens, lacking)
        alone = is_tail(chosen.uncached_tokens, chosen.cached_blocks)
        begins_at = None if alone else now + chosen.wait_ms / 1000
        return {decode: PlacedWork(load, prompt_seconds, begins_at=begins_at, answer=answer)}
    load = Unreported(1, chosen.uncached_tokens, taken)
    begins_ms = chosen.ttft_ms - chosen.prompt_ms - constants.costs.request_ms - constants.costs.handover_ms / 2
    return {
        decode: PlacedWork(Unreported(1, 0, lacking), answer=answer),
        (chosen.prefill_worker_id, chosen.prefill_rank or 0): PlacedWork(
            load, prompt_seconds, now + chosen.wait_ms / 1000, now + begins_ms / 1000
        ),
    }


class Answers:
    """The answers of a rank. Those that have ended must be removed.

    Attributes:
        begins, expected_ends, latest_ends: the times of all of them, each list ascending, in seconds on the writer's
            clock.
    """

    def __init__(self) -> None:
        self._by_key: dict[PlacementKey, Answer] = {}
        self.begins: list[float] = []
        self.expected_ends: list[float] = []
        self.latest_ends: list[float] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, key: PlacementKey, answer: Answer) -> None:
        self.remove(key)
        self._by_key[key] = answer
        insort(self.begins, answer.begins_at)
        insort(self.expected_ends, answer.expected_at)
        insort(self.latest_ends, answer.latest_at)

    def remove(self, key: PlacementKey) -> bool:
        """False if it was not there."""
        answer = self._by_key.pop(key, None)
        if answer is None:
            return False
        del self.begins[bisect_left(self.begins, answer.begins_at)]
        del self.expected_ends[bisect_left(self.expected_ends, answer.expected_at)]
        del self.latest_ends[bisect_left(self.latest_ends, answer.latest_at)]
        return True

    def forget_before(self, time: float) -> None:
        """Remove the answers that must have ended before `time`."""
        if self.latest_ends and self.latest_ends[0] < time:
            self._by_key = {key: answer for key, answer in self._by_key.items() if answer.latest_at >= time}
            left = self._by_key.values()
            self.begins = sorted(answer.begins_at for answer in left)
            self.expected_ends = sorted(answer.expected_at for answer in left)
            self.latest_ends = sorted(answer.latest_at for answer in left)


def placed_answers(ranks: Sequence[Answers]) -> PlacedAnswers:
    """The answers of some ranks together."""
    begins, ends = zip(*((rank.begins, rank.expected_ends) for rank in ranks), strict=True)
    # Sorting joins lists that are sorted themselves ten times as fast as heapq.merge.
    return PlacedAnswers(Times.of(sorted(chain(*begins))), Times.of(sorted(chain(*ends))))

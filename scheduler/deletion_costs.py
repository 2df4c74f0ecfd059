"""What the end of each worker would cost: when fewer are wanted, the cheapest should go.

Costs follow from what workers report. What a scheduler alone knows (what it placed itself, how long its answers were)
does not count: each of several schedulers writes costs, and would otherwise undo what another wrote.
"""

from collections.abc import Iterator

from mesh.blocks import BLOCK_TOKENS
from scheduler.candidates import CandidateWorker, Pace, PlacementKnobs
from scheduler.coordinator import Coordinator
from scheduler.estimates import paces
from scheduler.registry import Registry
from scheduler.waits import step_ms


def deletion_cost_ms(
    worker: CandidateWorker, pace: Pace, kept_blocks: int, output_tokens: float, knobs: PlacementKnobs
) -> float:
    """Milliseconds of its requests' time, all added up, and of computing anew what it keeps, `kept_blocks` of KV.

    output_tokens: that each of its requests has to go; none on a prefill worker, whose requests end with their prompts.
    A worker that drains ends its requests first, which takes as long as they would take anyway; what runs out of time
    begins again elsewhere. A worker with nothing costs nothing.
    """
    requests = worker.load.running_requests + worker.load.waiting_requests
    generating = requests * output_tokens * step_ms(worker, requests, pace, knobs) if requests else 0.0
    tokens_again = worker.load.queued_prefill_tokens + kept_blocks * BLOCK_TOKENS
    return generating + pace.prompt_slowness * tokens_again * knobs.costs.prompt_token_ms(0.0)


class DeletionCosts:
    def __init__(self, registry: Registry, coordinator: Coordinator, knobs: PlacementKnobs) -> None:
        self._registry = registry
        self._coordinator = coordinator
        self._knobs = knobs

    def now(self) -> dict[str, float]:
        """Milliseconds by worker id, of every live worker."""
        return dict(self._all())

    def _all(self) -> Iterator[tuple[str, float]]:
        kept = {worker.identity.worker_id: len(worker.cached) for worker in self._registry.workers()}
        for model in sorted({worker.identity.model for worker in self._registry.workers()}):
            candidates = self._coordinator.candidates(model)
            decode_paces, prefill_paces = paces(candidates, self._knobs)
            for worker, pace in zip(candidates.decode, decode_paces, strict=True):
                output = worker.load.mean_output_tokens or self._knobs.mean_output_tokens
                yield worker.worker_id, deletion_cost_ms(worker, pace, kept[worker.worker_id], output, self._knobs)
            for worker, pace in zip(candidates.prefill, prefill_paces, strict=True):
                yield worker.worker_id, deletion_cost_ms(worker, pace, kept[worker.worker_id], 0.0, self._knobs)

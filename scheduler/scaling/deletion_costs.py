"""What the end of each worker would cost: if fewer are wanted, the cheapest should end.

Costs follow only from what workers report. What one scheduler alone knows (its placements, the lengths of its answers)
does not count: several schedulers write costs, and would otherwise overwrite each other's.
"""

from collections.abc import Iterator

from mesh.blocks import BLOCK_TOKENS
from scheduler.coordinator import Coordinator
from scheduler.placement.candidates import CandidateWorker, Pace
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import paces
from scheduler.placement.times import step_ms
from scheduler.registry import Registry


def deletion_cost_ms(
    worker: CandidateWorker, pace: Pace, kept_blocks: int, output_tokens: float, constants: Constants
) -> float:
    """The cost in milliseconds: the time left for its requests, added up, and the time to compute its `kept_blocks` of
    KV again.

    output_tokens: tokens that each of its requests still has to generate; none on a prefill worker, whose requests end
    with their prompts. A draining worker ends its requests first, which takes as long as they would take anyway;
    requests that run out of time begin again elsewhere. A worker with nothing costs nothing.
    """
    requests = worker.load.running_requests + worker.load.waiting_requests
    generating = requests * output_tokens * step_ms(worker, requests, pace, constants) if requests else 0.0
    tokens_again = worker.load.queued_prefill_tokens + kept_blocks * BLOCK_TOKENS
    return generating + pace.prompt_slowness * tokens_again * constants.costs.prompt_token_ms(0.0)


class DeletionCosts:
    def __init__(self, registry: Registry, coordinator: Coordinator, constants: Constants) -> None:
        self._registry = registry
        self._coordinator = coordinator
        self._constants = constants

    def now(self) -> dict[str, float]:
        """Cost in milliseconds of every live worker, by worker id."""
        return dict(self._all())

    def _all(self) -> Iterator[tuple[str, float]]:
        kept = {worker.identity.worker_id: len(worker.cached) for worker in self._registry.workers()}
        for model in sorted({worker.identity.model for worker in self._registry.workers()}):
            candidates = self._coordinator.candidates(model)
            decode_paces, prefill_paces = paces(candidates, self._constants)
            for worker, pace in zip(candidates.decode, decode_paces, strict=True):
                output, name = worker.load.mean_output_tokens, worker.identity.worker_id
                output = output or self._constants.config.mean_output_tokens
                yield name, deletion_cost_ms(worker, pace, kept[name], output, self._constants)
            for worker, pace in zip(candidates.prefill, prefill_paces, strict=True):
                name = worker.identity.worker_id
                yield name, deletion_cost_ms(worker, pace, kept[name], 0.0, self._constants)

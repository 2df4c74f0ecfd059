"""One placement from end to end: the registry's view, the pure decision, and what is remembered of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mesh.errors import MeshError, NoWorker, UnknownModel
from mesh.observe import span
from mesh.workers import WorkerIdentity, WorkerRole, WorkerState
from scheduler.admission import Objectives, admit, refusal
from scheduler.decisions import Decision, DecisionLog, Outcome
from scheduler.lengths import OutputLengths
from scheduler.placement import (
    CandidateWorker,
    PlacementKnobs,
    PlacementRequest,
    Terms,
    choose,
    explain,
    placed_work,
    predict,
    preference,
)
from scheduler.registry import Registry, Worker


@dataclass(frozen=True, slots=True)
class PlacementCall:
    """A request to be placed, as its gateway describes it."""

    request_id: str
    attempt: int
    model: str
    request: PlacementRequest
    # Of the prompt's full blocks, root first.
    block_hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class PlacementAnswer:
    """Where the request goes, why, and what every other candidate had to offer."""

    worker: WorkerIdentity
    chosen: Terms
    terms: tuple[Terms, ...]
    reason: str


# Of a decision, the candidates that are remembered: the best, and those it was close with.
KEPT_CANDIDATES = 16


class Coordinator:
    """Places requests on the workers of a registry. `wall_clock`: seconds since the epoch, for the log."""

    def __init__(
        self,
        registry: Registry,
        decisions: DecisionLog,
        lengths: OutputLengths,
        knobs: PlacementKnobs,
        objectives: Objectives,
        wall_clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._decisions = decisions
        self._lengths = lengths
        self._knobs = knobs
        self._objectives = objectives
        self._wall_clock = wall_clock

    def place(self, call: PlacementCall) -> PlacementAnswer:
        """Raises UnknownModel, NoWorker, ContextExceeded or Overloaded. What candidates led to is remembered."""
        with span("scheduler.place", attempt=call.attempt):
            return self._place(call)

    def _place(self, call: PlacementCall) -> PlacementAnswer:
        workers = self._candidates(call.model)
        candidates = [_candidate(worker, call.block_hashes) for worker in workers]
        request = replace(call.request, mean_output_tokens=self._lengths.mean(call.model))
        terms = admit(predict(request, candidates, self._knobs), self._objectives)
        chosen = choose(terms)
        if chosen is None:
            error = refusal(call.model, terms, self._objectives)
            self._remember(call, None, error.message, terms)
            raise error
        reason = explain(chosen, terms)
        self._remember(call, chosen.worker_id, reason, terms)
        self._registry.add_placement(
            chosen.worker_id, (call.request_id, call.attempt), placed_work(call.request, chosen)
        )
        worker = next(worker.identity for worker in workers if worker.identity.worker_id == chosen.worker_id)
        return PlacementAnswer(worker, chosen, terms, reason)

    def report(self, request_id: str, attempt: int, outcome: Outcome, output_tokens: int) -> bool:
        """How a placement ended. False where that was known already, or the placement is forgotten."""
        decision = self._decisions.settle(request_id, attempt, outcome)
        if decision is None or decision.worker_id is None:
            return False
        self._registry.settle_placement(decision.worker_id, (request_id, attempt))
        if outcome is Outcome.FINISHED:
            self._lengths.observe(decision.model, output_tokens)
        return True

    def _candidates(self, model: str) -> list[Worker]:
        workers = [w for w in self._registry.serving_model(model) if w.identity.role is WorkerRole.DECODE]
        if workers:
            return workers
        error: MeshError
        if self._registry.knows_model(model):
            error = NoWorker(f"no live worker serves model {model!r} now: retry once one has started")
        else:
            error = UnknownModel(f"no worker ever served model {model!r}: see ListModels for those there are")
        raise error

    def _remember(self, call: PlacementCall, worker_id: str | None, reason: str, terms: tuple[Terms, ...]) -> None:
        best_first = sorted(terms, key=preference)
        self._decisions.add(
            Decision(
                time=self._wall_clock(),
                request_id=call.request_id,
                attempt=call.attempt,
                model=call.model,
                worker_id=worker_id,
                reason=reason,
                terms=tuple(best_first[:KEPT_CANDIDATES]),
            )
        )


def _candidate(worker: Worker, block_hashes: Sequence[bytes]) -> CandidateWorker:
    identity = worker.identity
    unusable = None
    if worker.state is WorkerState.DRAINING:
        unusable = "it is draining"
    elif not identity.can_prefill:
        unusable = "it cannot compute prompts, and there is no prefill worker"
    return CandidateWorker(
        worker_id=identity.worker_id,
        unusable=unusable,
        context_tokens=identity.context_tokens,
        total_blocks=identity.total_blocks,
        max_requests=identity.max_requests,
        load=worker.load,
        unreported=worker.unreported,
        cached_blocks=worker.cached_prefix(block_hashes),
        connected=worker.connected,
    )

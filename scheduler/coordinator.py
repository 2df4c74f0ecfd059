"""One placement from end to end: asks registry and stores, lets the pure functions decide, and records the decision."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from mesh.domain.shares import ONE_TENANT, Share
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import KvNamespace, WorkerIdentity, WorkerRole
from mesh.errors import MeshError, NoWorker, NoWorkerYet, UnknownModel
from mesh.observe import span
from scheduler.decisions import Decision, DecisionLog, Outcome
from scheduler.lengths import OutputLengths
from scheduler.live_worker import Worker
from scheduler.placement.admission import Objectives, admit, refusal
from scheduler.placement.candidates import Candidates, CandidateWorker, PlacementKnobs, PlacementRequest
from scheduler.placement.choice import explain
from scheduler.placement.comparison import Comparison
from scheduler.placement.ends import PlacementKey
from scheduler.placement.placed_work import placed_work
from scheduler.placement.terms import Rejection, Terms
from scheduler.prefix_index import Holders
from scheduler.registry import Registry
from scheduler.stores import Stores
from scheduler.tenants import Placed, PlacedRequests


@dataclass(frozen=True, slots=True)
class PlacementCall:
    """A request to be placed, as its gateway describes it."""

    # Drawn by the gateway; the same for all attempts of one request.
    generation_id: str
    attempt: int
    model: str
    request: PlacementRequest
    # Chain hashes of the prompt's full blocks, root first.
    block_hashes: Sequence[bytes] = ()
    share: Share = ONE_TENANT
    # The request's name in logs; clients may use the same name for several requests.
    request_id: str = ""

    @property
    def key(self) -> PlacementKey:
        """Identifies the placement."""
        return self.generation_id, self.attempt


class PlacementAnswer(msgspec.Struct, frozen=True):
    """Where the request goes, and why."""

    decode: WorkerIdentity
    # None if the decode worker computes the prompt.
    prefill: WorkerIdentity | None
    chosen: Terms
    reason: str
    # How many leading blocks of the prompt each worker or store holds, by its id; only those that hold any.
    cached: Mapping[str, int]


# Workers report again within about a second after their scheduler has restarted.
MAX_YOUNG_RETRY_MS = 1000
# For these rejections the workers that were not compared are tried too: they may be larger, or fit together.
_OTHERS_MAY_FIT = (Rejection.CONTEXT, Rejection.NAMESPACE)


class Coordinator:
    """Places requests on the workers of a registry. `wall_clock`: seconds since the epoch, for the log.

    Stores are asked only if more than `ignored_blocks` of a prompt are cached by no worker that could compute it.
    """

    def __init__(
        self,
        registry: Registry,
        stores: Stores,
        ignored_blocks: int,
        placed: PlacedRequests,
        decisions: DecisionLog,
        lengths: OutputLengths,
        knobs: PlacementKnobs,
        objectives: Objectives,
        wall_clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._stores = stores
        self._ignored_blocks = ignored_blocks
        self._placed = placed
        self._decisions = decisions
        self._lengths = lengths
        self._knobs = knobs
        self._objectives = objectives
        self._wall_clock = wall_clock

    async def place(self, call: PlacementCall) -> PlacementAnswer:
        """Raises UnknownModel, NoWorker, NamespaceMismatch, ContextExceeded or Overloaded.

        While the registry may lack live workers, it raises NoWorkerYet instead of any of them. Every decision is
        recorded, refusals too.
        """
        try:
            with span("scheduler.place", attempt=call.attempt):
                holders = self._registry.holders(call.block_hashes)
                looks = self._registry.worth_a_look(call.model, holders, len(call.request.avoid))
                workers = self._known(call.model, looks)
                hints: dict[KvNamespace, StoreTarget] = {}
                if self._stores.any_answers:
                    hints = await self._ask_stores(call, workers, holders)
                    # Workers may leave while a store is asked.
                    workers = self._known(call.model, self._registry.living(workers))
                return self._place(call, workers, holders, hints)
        except MeshError as refusal_so_far:
            complete_in = self._registry.complete_in
            if not complete_in:
                raise
            raise NoWorkerYet(
                f"this scheduler started less than a lease ago and may not know every worker yet "
                f"({refusal_so_far.message}): retry",
                retry_after_ms=min(MAX_YOUNG_RETRY_MS, math.ceil(1000 * complete_in)),
            ) from refusal_so_far

    def _place(
        self,
        call: PlacementCall,
        workers: Collection[Worker],
        holders: Holders,
        hints: Mapping[KvNamespace, StoreTarget],
    ) -> PlacementAnswer:
        asked = call.request
        request = PlacementRequest(
            asked.prompt_tokens,
            asked.max_tokens,
            asked.avoid,
            mean_output_tokens=self._lengths.mean(call.model),
            sparse_from=asked.sparse_from,
            stopping=self._lengths.stopping(call.model),
            ahead=self._placed.ahead(call.share),
        )
        compared = self._compared(request, workers, holders, hints)
        choice = compared.best()
        if choice.best is None and any(term.rejection in _OTHERS_MAY_FIT for term in choice.terms):
            workers, holders = self._registry.serving_model(call.model), self._registry.holders(call.block_hashes)
            compared = self._compared(request, workers, holders, hints)
            choice = compared.best()
        chosen = choice.best
        if chosen is None:
            error = refusal(call.model, admit(choice.terms, self._objectives), self._objectives)
            self._remember(call, None, error.message, compared)
            raise error
        reason = explain(request, chosen, choice.count)
        self._remember(call, chosen, reason, compared)
        self._placed.add(call.key, call.share, Placed(call.model, chosen.worker_ids, asked.max_tokens))
        for (worker_id, rank), work in placed_work(request, chosen, compared.candidates.now, self._knobs).items():
            self._registry.add_placement(worker_id, rank, call.key, work)
        cached = {worker.identity.worker_id: blocks for worker in workers if (blocks := max(worker.prefixes(holders)))}
        cached |= {hint.store_id: hint.blocks for hint in hints.values()}
        decode = self._registry.identity(chosen.worker_id)
        prefill = None if chosen.prefill_worker_id is None else self._registry.identity(chosen.prefill_worker_id)
        return PlacementAnswer(decode, prefill, chosen, reason, cached)

    def _compared(
        self,
        request: PlacementRequest,
        workers: Collection[Worker],
        holders: Holders,
        hints: Mapping[KvNamespace, StoreTarget],
    ) -> Comparison:
        """The request and these workers; for a worker with several ranks, the rank that it would choose."""
        decode: list[CandidateWorker] = []
        prefill: list[CandidateWorker] = []
        for worker in workers:
            candidate = worker.candidate(request.prompt_tokens, holders)
            (decode if worker.decodes else prefill).append(candidate)
        candidates = Candidates(decode, prefill, hints, self._registry.now)
        return Comparison(request, candidates, self._knobs, self._objectives)

    def report(self, generation_id: str, attempt: int, outcome: Outcome, output_tokens: int) -> bool:
        """Record how a placement ended. False if that was known already, or if the placement is forgotten."""
        placed = self._placed.end((generation_id, attempt))
        decision = self._decisions.settle(generation_id, attempt, outcome)
        # Under high load the log and `_placed` forget old entries at different times: use the one that is left.
        if placed is None and decision is not None and decision.chosen is not None:
            placed = Placed(decision.model, decision.chosen.worker_ids, decision.compared.request.max_tokens)
        if placed is None:
            return False
        for worker_id in placed.worker_ids:
            self._registry.settle_placement(worker_id, (generation_id, attempt))
        if outcome is Outcome.FINISHED:
            self._lengths.observe(placed.model, output_tokens, placed.max_tokens)
        return True

    def candidates(self, model: str) -> Candidates:
        """The live workers of a model, each as a whole, holding nothing of any prompt."""
        workers = self._registry.serving_model(model)
        return Candidates(
            [worker.whole() for worker in workers if worker.identity.role is WorkerRole.DECODE],
            [worker.whole() for worker in workers if worker.identity.role is WorkerRole.PREFILL],
            now=self._registry.now,
        )

    def mean_output_tokens(self, model: str) -> float | None:
        """The mean over the model's finished requests; None before the first."""
        return self._lengths.mean(model)

    async def _ask_stores(
        self, call: PlacementCall, workers: Collection[Worker], holders: Holders
    ) -> dict[KvNamespace, StoreTarget]:
        """What stores hold of the prompt, by KV namespace. They are asked only if the answer could matter."""
        chain = call.block_hashes[: call.request.reusable_blocks]
        longest: dict[KvNamespace, int] = {}
        for worker in workers:
            if worker.identity.role is WorkerRole.PREFILL or worker.identity.can_prefill:
                namespace = worker.identity.kv_namespace
                longest[namespace] = max(longest.get(namespace, 0), *worker.prefixes(holders))
        hints = {
            namespace: await self._stores.match(namespace, chain)
            for namespace, blocks in longest.items()
            if len(chain) - blocks > self._ignored_blocks
        }
        return {namespace: hint for namespace, hint in hints.items() if hint is not None}

    def _known(self, model: str, workers: list[Worker]) -> list[Worker]:
        """Returns `workers`. Raises NoWorker or UnknownModel if none of them decodes."""
        if any(worker.decodes for worker in workers):
            return workers
        error: MeshError
        if self._registry.knows_model(model):
            error = NoWorker(f"no live decode worker serves model {model!r} now: retry once one has started")
        else:
            error = UnknownModel(f"no worker ever served model {model!r}: see ListModels for those there are")
        raise error

    def _remember(self, call: PlacementCall, chosen: Terms | None, reason: str, compared: Comparison) -> None:
        self._decisions.add(
            Decision(
                time=self._wall_clock(),
                generation_id=call.generation_id,
                request_id=call.request_id,
                attempt=call.attempt,
                model=call.model,
                chosen=chosen,
                reason=reason,
                compared=compared,
            )
        )

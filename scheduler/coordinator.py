"""One placement from end to end: asks registry and stores, lets the pure functions decide, and records the decision."""

import math
from collections.abc import Callable, Collection, Mapping

import msgspec

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.placement import AttemptOutcome, AttemptReport, Placement, PlacementQuery
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import WorkerRole
from mesh.errors import MeshError, NoWorker, NoWorkerYet, UnknownModel
from mesh.observe.spans import span
from scheduler.config import ObjectivesConfig
from scheduler.decisions import Decision, DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.live_worker import Worker
from scheduler.placement.candidates import Candidates, CandidateWorker, PlacementRequest, reusable_blocks
from scheduler.placement.choose import Comparison, admit, explain, refusal
from scheduler.placement.constants import Constants
from scheduler.placement.placed_work import placed_work
from scheduler.placement.terms import Rejection, Terms
from scheduler.prefix_index import Holders
from scheduler.registry import Registry
from scheduler.stores import Stores
from scheduler.tenants import Placed, PlacedRequests


class ExplainedPlacement(msgspec.Struct, frozen=True):
    """A placement, and why it was chosen."""

    placement: Placement
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
        constants: Constants,
        objectives: ObjectivesConfig,
        wall_clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._stores = stores
        self._ignored_blocks = ignored_blocks
        self._placed = placed
        self._decisions = decisions
        self._lengths = lengths
        self._constants = constants
        self._objectives = objectives
        self._wall_clock = wall_clock

    async def place(self, query: PlacementQuery) -> ExplainedPlacement:
        """Raises UnknownModel, NoWorker, NamespaceMismatch, ContextExceeded or Overloaded.

        While the registry may lack live workers, it raises NoWorkerYet instead of any of them. Every decision is
        recorded, refusals too.
        """
        try:
            with span("scheduler.place", attempt=query.attempt):
                holders = self._registry.holders(query.block_hashes)
                looks = self._registry.worth_a_look(query.model, holders, len(query.avoid))
                workers = self._known(query.model, looks)
                hints: dict[KvNamespace, StoreTarget] = {}
                if self._stores.any_answers:
                    hints = await self._ask_stores(query, workers, holders)
                    # Workers may leave while a store is asked.
                    workers = self._known(query.model, self._registry.living(workers))
                return self._place(query, workers, holders, hints)
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
        query: PlacementQuery,
        workers: Collection[Worker],
        holders: Holders,
        hints: Mapping[KvNamespace, StoreTarget],
    ) -> ExplainedPlacement:
        request = PlacementRequest(
            # The log keeps the request, but not the hashes: those of a long prompt take a megabyte.
            msgspec.structs.replace(query, block_hashes=()),
            mean_output_tokens=self._lengths.mean(query.model),
            stopping=self._lengths.stopping(query.model),
            ahead=self._placed.ahead(query.share),
        )
        compared = self._compared(request, workers, holders, hints)
        choice = compared.best()
        if choice.best is None and any(term.rejection in _OTHERS_MAY_FIT for term in choice.terms):
            workers, holders = self._registry.serving_model(query.model), self._registry.holders(query.block_hashes)
            compared = self._compared(request, workers, holders, hints)
            choice = compared.best()
        chosen = choice.best
        if chosen is None:
            error = refusal(query.model, admit(choice.terms, self._objectives), self._objectives)
            self._remember(None, error.message, compared)
            raise error
        reason = explain(request, chosen, choice.count)
        self._remember(chosen, reason, compared)
        self._placed.add(query.key, query.share, Placed(query.model, chosen.worker_ids, query.max_tokens))
        for (worker_id, rank), work in placed_work(request, chosen, compared.candidates.now, self._constants).items():
            self._registry.add_placement(worker_id, rank, query.key, work)
        cached = {worker.identity.worker_id: blocks for worker in workers if (blocks := worker.found(holders))}
        cached |= {hint.store_id: hint.blocks for hint in hints.values()}
        return ExplainedPlacement(self._named(chosen), chosen, reason, cached)

    def _named(self, chosen: Terms) -> Placement:
        prefill_id = chosen.prefill_worker_id
        return Placement(
            decode=self._registry.identity(chosen.worker_id).target,
            prefill=None if prefill_id is None else self._registry.identity(prefill_id).target,
            store=chosen.store,
            decode_rank=chosen.rank,
            prefill_rank=chosen.prefill_rank,
        )

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
            candidate = worker.candidate(request.query.prompt_tokens, holders)
            (decode if worker.decodes else prefill).append(candidate)
        candidates = Candidates(decode, prefill, hints, self._registry.now)
        return Comparison(request, candidates, self._constants, self._objectives)

    def report(self, report: AttemptReport) -> bool:
        """Record how a placement ended. False if that was known already, or if the placement is forgotten."""
        placed = self._placed.end(report.key)
        decision = self._decisions.settle(report.key, report.outcome)
        # Under high load the log and `_placed` forget old entries at different times: use the one that is left.
        if placed is None and decision is not None and decision.chosen is not None:
            placed = Placed(decision.query.model, decision.chosen.worker_ids, decision.query.max_tokens)
        if placed is None:
            return False
        for worker_id in placed.worker_ids:
            self._registry.settle_placement(worker_id, report.key)
        if report.outcome is AttemptOutcome.FINISHED:
            self._lengths.observe(placed.model, report.output_tokens, placed.max_tokens)
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
        self, query: PlacementQuery, workers: Collection[Worker], holders: Holders
    ) -> dict[KvNamespace, StoreTarget]:
        """What stores hold of the prompt, by KV namespace. They are asked only if the answer could matter."""
        chain = query.block_hashes[: reusable_blocks(query.prompt_tokens)]
        longest: dict[KvNamespace, int] = {}
        for worker in workers:
            if worker.identity.role is WorkerRole.PREFILL or worker.identity.can_prefill:
                namespace = worker.identity.kv_namespace
                longest[namespace] = max(longest.get(namespace, 0), worker.found(holders))
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
        if self._registry.knows_model(model):
            raise NoWorker(f"no live decode worker serves model {model!r} now: retry once one has started")
        raise UnknownModel(f"no worker ever served model {model!r}: see ListModels for those there are")

    def _remember(self, chosen: Terms | None, reason: str, compared: Comparison) -> None:
        self._decisions.add(Decision(self._wall_clock(), chosen, reason, compared))

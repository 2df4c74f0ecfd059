"""The workers in the scheduler's registry, and placement without a scheduler."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gateway.requests import ModelLimits
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import WorkerTarget
from mesh.domain.workers import WorkerRole


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the registry last showed it."""

    target: WorkerTarget
    role: WorkerRole
    model: str
    # This worker's KV can move to any worker whose namespace this one `provides`.
    kv_namespace: KvNamespace
    can_prefill: bool
    # Whether the worker takes requests: it is neither draining nor stopping.
    serving: bool
    context_tokens: int
    vocabulary_size: int
    max_requests: int
    # Requests that run or wait on it.
    requests: int
    # How the worker computes the attention of long prompts; None means exactly.
    sparse_prefill: SparsePrefill | None = None


@dataclass(slots=True)
class _Model:
    # The largest limits that its decode workers have declared.
    limits: ModelLimits
    # When its last decode worker lost its lease; None while it has one.
    left_at: float | None = None
    # How all workers that compute the model's prompts do so, as last reported; None means exactly, or that the workers
    # differ.
    sparse_prefill: SparsePrefill | None = None


class WorkerDirectory:
    """The last snapshot of the registry. Times are seconds on any one monotonic clock, passed in.

    A watch is one stream of snapshots. A worker that a watch listed and then no longer lists has lost its lease. A
    worker known from before the watch has one lease to appear in it, because a scheduler that just started does not
    know its workers yet.

    A model stays known until `model_seconds` after its last decode worker lost its lease, so that requests can wait for
    a worker that is being restarted.
    """

    def __init__(self, model_seconds: float) -> None:
        self._model_seconds = model_seconds
        self._workers: dict[str, Worker] = {}
        self._models: dict[str, _Model] = {}
        self._listed: set[str] = set()
        self._watch_began = 0.0
        self._lease_seconds = 0.0
        self._valid_until: float | None = 0.0

    def begin_watch(self, now: float) -> None:
        """A new stream of snapshots begins."""
        self._watch_began = now
        self._listed.clear()

    def end_watch(self, now: float) -> None:
        """The stream broke: the snapshot stays valid for one more lease."""
        self._valid_until = now + self._lease_seconds

    def update(self, workers: Iterable[Worker], lease_seconds: float, now: float) -> None:
        """Take a snapshot of the current watch."""
        listed = {worker.target.worker_id: worker for worker in workers}
        awaited = now < self._watch_began + lease_seconds
        missing = {
            name: worker
            for name, worker in self._workers.items()
            if awaited and name not in listed and name not in self._listed
        }
        self._workers = missing | listed
        self._listed |= listed.keys()
        self._lease_seconds = lease_seconds
        self._valid_until = None
        for worker in filter(_decodes, listed.values()):
            self._note_limits(worker)
        for name, model in self._models.items():
            self._note_sparse_prefill(name, model)
        self._note_models_without_workers(now)

    def expire(self, now: float) -> bool:
        """Drop workers known before the watch that never appeared in it, once one lease has passed, and models whose
        time is over. True if any worker was dropped. Call it often: only this notices that time has passed.
        """
        dropped = self._drop_unlisted(now)
        self._note_models_without_workers(now)
        return dropped

    def _drop_unlisted(self, now: float) -> bool:
        if self._valid_until is not None or now < self._watch_began + self._lease_seconds:
            return False
        before = len(self._workers)
        self._workers = {name: worker for name, worker in self._workers.items() if name in self._listed}
        return len(self._workers) < before

    def valid(self, now: float) -> bool:
        """Whether the snapshot may be used for placement."""
        return self._valid_until is None or now < self._valid_until

    def incarnations(self) -> dict[str, str]:
        """Incarnation of each worker with a lease, by worker id."""
        return {name: worker.target.incarnation for name, worker in self._workers.items()}

    def models(self) -> list[str]:
        """Names of the models that have a decode worker, or had one until a short while ago, sorted."""
        return sorted(self._models)

    def limits(self, model: str) -> ModelLimits | None:
        """None for a model that is not among `models`."""
        known = self._models.get(model)
        return None if known is None else known.limits

    def sparse_prefill(self, model: str) -> SparsePrefill | None:
        """How every worker of the model computes the attention of long prompts; None if not all do so alike."""
        known = self._models.get(model)
        return None if known is None else known.sparse_prefill

    def decode_targets(self, model: str) -> list[WorkerTarget]:
        """Every decode worker of the model, whatever its state."""
        return [each.target for each in filter(_decodes, self._workers.values()) if each.model == model]

    def kv_namespaces(self, model: str) -> set[KvNamespace]:
        """KV namespaces of the model's decode workers; a namespace covers the weights."""
        return {each.kv_namespace for each in filter(_decodes, self._workers.values()) if each.model == model}

    def serving(self, model: str) -> int:
        """Workers that take requests for `model`."""
        return sum(worker.serving and worker.model == model for worker in filter(_decodes, self._workers.values()))

    @property
    def any_serving(self) -> bool:
        return any(worker.serving for worker in filter(_decodes, self._workers.values()))

    def least_loaded(
        self, model: str, avoid: Collection[str], live: Mapping[str, int]
    ) -> tuple[WorkerTarget, WorkerTarget | None] | None:
        """The decode worker with the smallest share of its slots in use and, if it computes no prompts, the least
        loaded prefill worker whose KV namespace shares its base. None if there is none. `live` counts this gateway's
        own requests, by decode worker's id.
        """
        usable = [
            worker
            for name, worker in self._workers.items()
            if worker.serving and worker.model == model and name not in avoid
        ]
        usable.sort(key=lambda worker: _load(worker, live))
        for decode in filter(_decodes, usable):
            if decode.can_prefill:
                return decode.target, None
            partners = [
                each for each in usable if not _decodes(each) and each.kv_namespace.shares_base(decode.kv_namespace)
            ]
            if partners:
                return decode.target, partners[0].target
        return None

    def _note_limits(self, worker: Worker) -> None:
        known = self._models.get(worker.model)
        if known is None:
            self._models[worker.model] = _Model(_widest(None, worker))
        else:
            known.limits, known.left_at = _widest(known.limits, worker), None

    def _note_sparse_prefill(self, name: str, model: _Model) -> None:
        """A model keeps its last setting while it has no worker."""
        computing = [each for each in self._workers.values() if each.model == name and _computes_prompts(each)]
        ways = {each.sparse_prefill for each in computing}
        if ways:
            model.sparse_prefill = ways.pop() if len(ways) == 1 else None

    def _note_models_without_workers(self, now: float) -> None:
        decoded = {worker.model for worker in filter(_decodes, self._workers.values())}
        for name, model in list(self._models.items()):
            if name in decoded:
                model.left_at = None
            elif model.left_at is None:
                model.left_at = now
            elif model.left_at + self._model_seconds <= now:
                del self._models[name]


def _decodes(worker: Worker) -> bool:
    return worker.role is WorkerRole.DECODE


def _computes_prompts(worker: Worker) -> bool:
    return worker.can_prefill or not _decodes(worker)


def _load(worker: Worker, live: Mapping[str, int]) -> tuple[float, str]:
    """Share of the worker's slots in use, and its name to break ties. The snapshot's count is old, and `live` counts
    only this gateway's requests, so the larger of the two is the better guess.
    """
    name = worker.target.worker_id
    return max(worker.requests, live.get(name, 0)) / max(worker.max_requests, 1), name


def _widest(known: ModelLimits | None, worker: Worker) -> ModelLimits:
    if known is None:
        return ModelLimits(worker.context_tokens, worker.vocabulary_size)
    return ModelLimits(
        max(known.context_tokens, worker.context_tokens), max(known.vocabulary_size, worker.vocabulary_size)
    )

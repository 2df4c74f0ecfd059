"""Workers, loads and candidates with plain defaults, for tests of the scheduler."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from mesh.costs import CostModel
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.placement import PlacementQuery
from mesh.domain.workers import PromptPace, WorkerIdentity, WorkerLoad, WorkerRole
from scheduler.config import PlacementConfig
from scheduler.placement.candidates import Candidates, CandidateWorker, PlacementRequest
from scheduler.placement.choose import best_first
from scheduler.placement.constants import Constants
from scheduler.placement.predict import predict
from scheduler.placement.terms import Terms
from scheduler.ranks import Rank

NAMESPACE = KvNamespace("fingerprint", "oracle", 1, "oracle")


@dataclass
class ManualClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def make_identity(worker_id: str = "decode-1", **changes: Any) -> WorkerIdentity:
    identity = WorkerIdentity(
        worker_id=worker_id,
        incarnation="first",
        role=WorkerRole.DECODE,
        endpoint="127.0.0.1:1",
        model="oracle",
        kv_namespace=NAMESPACE,
        context_tokens=4096,
        total_blocks=1000,
        max_requests=8,
        can_prefill=True,
        vocabulary_size=1000,
        block_bytes=1_000_000,
        worker_class="",
        max_step_tokens=8192,
        layerwise_tokens=8192,
    )
    return msgspec.structs.replace(identity, **changes)


def make_load(running_requests: int = 0, **changes: Any) -> WorkerLoad:
    """A load whose step time was measured with the requests that run, and whose prompts were all exact."""
    rate = changes.get("prefill_tokens_per_second", 1000.0)
    load = WorkerLoad(
        running_requests=running_requests,
        free_blocks=1000,
        prefill_tokens_per_second=rate,
        exact_prompts=None if rate is None else PromptPace(rate),
        decode_step_ms=10.0,
        mean_output_tokens=100.0,
        decode_step_requests=running_requests,
    )
    return msgspec.structs.replace(load, **changes)


def make_candidate(worker_id: str = "decode-1", **changes: Any) -> CandidateWorker:
    candidate = CandidateWorker(identity=make_identity(worker_id), total_blocks=1000, max_requests=8, load=make_load())
    return changed(candidate, **changes)


def changed(candidate: CandidateWorker, **changes: Any) -> CandidateWorker:
    """`changes` of the candidate, or of its identity."""
    of_identity = {name: changes.pop(name) for name in list(changes) if name not in CandidateWorker.__struct_fields__}
    identity = msgspec.structs.replace(candidate.identity, **of_identity)
    return msgspec.structs.replace(candidate, identity=identity, **changes)


def predict_alone(
    request: PlacementRequest, decode: Iterable[CandidateWorker], constants: Constants
) -> tuple[Terms, ...]:
    """Predict for a mesh without prefill workers and stores."""
    return predict(request, Candidates(list(decode)), constants)


def make_constants(costs: CostModel | None = None, **config: Any) -> Constants:
    return Constants(costs or CostModel(), PlacementConfig(**config))


def make_query(generation_id: str = "r", attempt: int = 0, **changes: Any) -> PlacementQuery:
    return PlacementQuery(
        generation_id,
        attempt,
        **{"model": "oracle", "prompt_tokens": 640, "max_tokens": 100, "request_id": generation_id, **changes},
    )


def make_request(**changes: Any) -> PlacementRequest:
    """`changes` of the query, or of what the scheduler adds to it."""
    added = {name: changes.pop(name) for name in ("mean_output_tokens", "stopping", "ahead") if name in changes}
    return PlacementRequest(make_query(**changes), **added)


def choose(terms: Iterable[Terms]) -> Terms | None:
    """The best of the terms that were not rejected; None if all were."""
    ordered = best_first(terms)
    return ordered[0] if ordered and ordered[0].rejection is None else None


def make_rank(number: int = 0, costs: CostModel | None = None, step_tokens: int = 8192) -> Rank:
    return Rank(number, costs or CostModel(), step_tokens)

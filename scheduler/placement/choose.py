"""Which candidate a request gets: the best of those whose prediction meets the objectives, or the error of a refusal.
Pure.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from mesh.errors import ContextExceeded, MeshError, NamespaceMismatch, NoWorker, Overloaded
from scheduler.config import ObjectivesConfig
from scheduler.placement.candidates import Candidates, PlacementRequest
from scheduler.placement.constants import Constants
from scheduler.placement.parts import DecodeShare
from scheduler.placement.predict import Parts, count_of, parts_of, predict, terms_of
from scheduler.placement.terms import Rejection, Terms

MIN_RETRY_MS = 100
MAX_RETRY_MS = 30_000


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The result of `best`."""

    # None if every candidate was rejected or not admitted.
    best: Terms | None
    # The terms that were computed; all terms if there is no best.
    terms: Sequence[Terms]
    # How many terms there are in total.
    count: int


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """One request and all that it may be placed on. Plain data, so its methods give the same answer at any time."""

    request: PlacementRequest
    candidates: Candidates
    constants: Constants
    objectives: ObjectivesConfig

    def best(self) -> Choice:
        """The best terms that are not rejected and meet the objectives.

        This is quicker than computing and sorting all terms: it skips a worker if its wait and its tokens alone take
        longer than the best found so far.
        """
        request, candidates, constants = self.request, self.candidates, self.constants
        found: Terms | None = None
        terms, count = list[Terms](), 0
        for parts in sorted(parts_of(request, candidates, constants), key=_least_ms):
            if found is not None and _is_worse(parts[0], found):
                count += count_of(parts)
                continue
            of_worker = terms_of(request, parts, candidates, constants)
            terms += of_worker
            for term in of_worker:
                better = found is None or term.preference() < found.preference()
                if better and term.rejection is None and meets(self.objectives, term):
                    found = term
        return Choice(found, terms, len(terms) + count)

    def terms(self) -> list[Terms]:
        """Terms of all candidates, best first."""
        return best_first(admit(predict(self.request, self.candidates, self.constants), self.objectives))


def best_first(terms: Iterable[Terms]) -> list[Terms]:
    return sorted(terms, key=Terms.preference)


def explain(request: PlacementRequest, chosen: Terms, count: int) -> str:
    """The decision in words. count: number of terms in total."""
    cached = f"{chosen.cached_blocks} blocks cached"
    sparsely = f", {chosen.sparse_tokens} of them sparsely" if chosen.sparse_tokens else ""
    if chosen.store is not None:
        cached += f", {chosen.store.store_id} asked for {chosen.store.blocks}"
    if chosen.host_blocks:
        cached += f", {chosen.host_blocks} blocks in the host memory of {chosen.worker_id}"
    if chosen.prefill_worker_id is not None:
        cached += f", {request.prompt_blocks - chosen.held_blocks - chosen.host_blocks} blocks to move"
    return (
        f"{chosen.name}: first token in {chosen.ttft_ms:.1f} ms ({chosen.uncached_tokens} prompt tokens to "
        f"compute{sparsely}, {cached}, {chosen.requests} requests before it), then {chosen.tpot_ms:.2f} ms a "
        f"token; {chosen.slots_left} slots left; best of {count}"
    )


def admit(terms: Iterable[Terms], objectives: ObjectivesConfig) -> tuple[Terms, ...]:
    """The terms; those whose prediction exceeds an objective become rejected."""
    return tuple(_judge(term, objectives) for term in terms)


def meets(objectives: ObjectivesConfig, term: Terms) -> bool:
    """Whether the terms meet the objectives, so that `admit` leaves them as they are."""
    return (objectives.ttft_ms is None or _latest_ms(term, objectives) <= objectives.ttft_ms) and (
        objectives.tpot_ms is None or term.tpot_ms <= objectives.tpot_ms
    )


def refusal(model: str, terms: Collection[Terms], objectives: ObjectivesConfig) -> MeshError:
    """The error for the caller if no candidate is left.

    ContextExceeded if no worker could ever take the request, NamespaceMismatch if no decode worker has a usable prefill
    worker, Overloaded with a delay if waiting helps, otherwise NoWorker.
    """
    reasons = "; ".join(f"{term.name}: {term.rejected}" for term in list(terms)[:3])
    if terms and all(term.rejection is Rejection.CONTEXT for term in terms):
        return ContextExceeded(f"prompt and max_tokens are too long for every worker of model {model!r} ({reasons})")
    if terms and all(term.rejection is Rejection.NAMESPACE for term in terms):
        return NamespaceMismatch(
            f"the prefill and decode workers of model {model!r} cannot exchange KV ({reasons}): start both with the "
            "same checkpoint and KV dtype"
        )
    waits = [wait for term in terms if (wait := _wait_ms(term, objectives)) is not None]
    if not waits:
        return NoWorker(f"no worker takes requests for model {model!r} now: retry once one has started")
    retry_after_ms = round(min(MAX_RETRY_MS, max(MIN_RETRY_MS, min(waits))))
    return Overloaded(
        f"model {model!r} has no room for this request now: retry in {retry_after_ms} ms",
        retry_after_ms=retry_after_ms,
    )


def _judge(term: Terms, objectives: ObjectivesConfig) -> Terms:
    if term.rejection is not None or meets(objectives, term):
        return term
    excess = []
    if objectives.ttft_ms is not None and (latest_ms := _latest_ms(term, objectives)) > objectives.ttft_ms:
        margin_ms = latest_ms - term.ttft_ms
        margin = f", {margin_ms:.1f} ms more if it waits as long as it may," if margin_ms else ""
        excess.append(
            f"time to first token of {term.ttft_ms:.1f} ms{margin} is over the objective of {objectives.ttft_ms:g} ms"
        )
    if objectives.tpot_ms is not None and term.tpot_ms > objectives.tpot_ms:
        excess.append(f"time per token of {term.tpot_ms:.1f} ms is over the objective of {objectives.tpot_ms:g} ms")
    return msgspec.structs.replace(
        term, rejection=Rejection.OBJECTIVE, rejected=f"its predicted {' and '.join(excess)}"
    )


def _wait_ms(term: Terms, objectives: ObjectivesConfig) -> float | None:
    """Predicted milliseconds until this candidate could take the request; None if waiting would not help."""
    if term.rejection is Rejection.OBJECTIVE and objectives.ttft_ms is not None:
        excess_ms = _latest_ms(term, objectives) - objectives.ttft_ms
        if excess_ms > 0:
            # The margin is a share of the wait, so it shrinks as the wait does: solve wait * (1 + margin) = excess.
            return excess_ms / (1 + objectives.wait_margin)
    # A worker is avoided because it refused this request, so to the caller the mesh is full rather than empty.
    if term.rejection in (Rejection.FULL, Rejection.OBJECTIVE, Rejection.AVOIDED):
        return term.drain_ms
    return None


def _latest_ms(term: Terms, objectives: ObjectivesConfig) -> float:
    """Milliseconds to the first token if the wait takes as long as it may.

    Waits are for the ends of answers of unknown lengths, so half of them take longer than predicted. If the predicted
    time alone had to meet the objective, a full fleet would keep every request waiting for about that time, and half of
    them would miss it.
    """
    return term.ttft_ms + objectives.wait_margin * (term.ttft_ms - term.prompt_ms)


def _is_worse(share: DecodeShare, found: Terms) -> bool:
    """Whether no terms of the worker can be better than those found."""
    return share.least_ms > found.total_ms and found.disconnected <= (not share.candidate.connected)


def _least_ms(parts: Parts) -> float:
    return parts[0].least_ms

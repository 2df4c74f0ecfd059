"""Whether a request is admitted: checks its prediction against the objectives, and builds the error of a refusal.
Pure.
"""

from collections.abc import Collection, Iterable

import msgspec

from mesh.errors import ContextExceeded, MeshError, NamespaceMismatch, NoWorker, Overloaded
from scheduler.config import ObjectivesConfig
from scheduler.placement.terms import Rejection, Terms

MIN_RETRY_MS = 100
MAX_RETRY_MS = 30_000


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

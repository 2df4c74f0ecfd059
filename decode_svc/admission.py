"""Whether this worker takes a request: checks that it could ever run here, and that there is room for it now. Pure."""

from decode_svc.config import DecodeQueueConfig
from decode_svc.sessions import RequestBacklog
from engine.protocol.messages import Ready
from mesh.domain.constraints import check_constraint
from mesh.domain.requests import Submission
from mesh.domain.sampling import check_sampling, check_stop_token_ids
from mesh.domain.sparse_prefill import check_sparse_prefill
from mesh.errors import InvalidRequest, PlaceAgain, WorkerFull
from worker.acceptance import check_prompt, check_salt


def check(submission: Submission, ready: Ready, can_prefill: bool) -> None:
    """Raises InvalidRequest or ContextExceeded if the request could never run on this worker.

    Raises PlaceAgain if it could run here only with a prefill worker.
    """
    if submission.request.stop.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    check_salt(submission.request.cache_salt)
    check_prompt(submission.request.token_ids, submission.request.stop.max_tokens, ready)
    check_stop_token_ids(submission.request.stop.token_ids, ready.vocabulary_size)
    check_sampling(submission.request.sampling, ready.vocabulary_size)
    if submission.request.constraint is not None:
        check_constraint(submission.request.constraint, ready.vocabulary_size)
    if submission.request.sparse is not None:
        check_sparse_prefill(submission.request.sparse)
    if submission.prefill is None and not can_prefill:
        raise PlaceAgain("this worker computes no prompts: place the request with a prefill worker")
    if submission.prefill is None:
        return
    if ready.transfer_address is None:
        raise InvalidRequest(
            "this worker receives no KV, its engine.transfer is not set: leave prefill out", field="prefill"
        )
    if not submission.prefill.endpoint:
        raise InvalidRequest("the prefill worker has no endpoint", field="prefill")
    piece_bytes = ready.block_bytes // ready.namespace.layers
    if submission.prefill.slot_bytes is not None and submission.prefill.slot_bytes < piece_bytes:
        raise InvalidRequest(
            f"the prefill worker's slots of {submission.prefill.slot_bytes} bytes do not hold one block of one layer,"
            f" which has {piece_bytes}: raise its transfer.slot_bytes",
            field="prefill.slot_bytes",
        )


def admit(submission: Submission, backlog: RequestBacklog, max_requests: int, queue: DecodeQueueConfig) -> None:
    """Raises WorkerFull if the request must go elsewhere. `max_requests` requests run at once.

    Waiting requests count only to the extent that they are served before this one.
    """
    waiting = backlog.live_requests - max_requests
    if waiting * backlog.ahead >= queue.waiting_requests:
        raise WorkerFull(f"{waiting} requests wait on this worker already: place this one on another")
    queued = backlog.queued_prefill_tokens
    if queued and queued * backlog.ahead + submission.own_prefill_tokens > queue.queued_prefill_tokens:
        raise WorkerFull(f"{queued} prompt tokens wait on this worker already: place this request on another")
    if backlog.kept_tokens > queue.kept_tokens:
        raise WorkerFull(f"the gateway has not acknowledged {backlog.kept_tokens} tokens of output: acknowledge them")

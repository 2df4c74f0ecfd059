"""Whether this worker takes a request: what could never run here, and what has no room now. Pure."""

from dataclasses import dataclass
from math import isfinite

from decode_svc.requests import Submission
from decode_svc.sessions import Backlog
from engine.messages import Ready
from mesh.blocks import BLOCK_TOKENS
from mesh.errors import ContextExceeded, InvalidRequest, WorkerFull

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_SALT_BYTES = 256


@dataclass(frozen=True, slots=True)
class QueueLimits:
    # Requests beyond those that run at once.
    waiting_requests: int
    # Prompts accepted and not computed; one request may exceed it alone.
    queued_prefill_tokens: int
    # Output that one gateway has not acknowledged.
    kept_tokens: int


def check(submission: Submission, ready: Ready) -> None:
    """Raises InvalidRequest or ContextExceeded where the request could never run on this worker."""
    if submission.prefill_elsewhere:
        raise InvalidRequest("this worker computes prompts itself: leave prefill out", field="prefill")
    if submission.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if len(submission.cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has at most {MAX_SALT_BYTES} bytes", field="cache_salt")
    _check_tokens(submission, ready)
    _check_sampling(submission)


def admit(submission: Submission, backlog: Backlog, max_requests: int, limits: QueueLimits) -> None:
    """Raises WorkerFull where the request has to go elsewhere; `max_requests` run at once."""
    waiting = backlog.live_requests - max_requests
    if waiting >= limits.waiting_requests:
        raise WorkerFull(f"{waiting} requests wait on this worker already: place this one on another")
    queued = backlog.queued_prefill_tokens
    if queued and queued + len(submission.token_ids) > limits.queued_prefill_tokens:
        raise WorkerFull(f"{queued} prompt tokens wait on this worker already: place this request on another")
    if backlog.kept_tokens > limits.kept_tokens:
        raise WorkerFull(f"the gateway has not acknowledged {backlog.kept_tokens} tokens of output: acknowledge them")


def _check_tokens(submission: Submission, ready: Ready) -> None:
    if not submission.token_ids:
        raise InvalidRequest("the prompt is empty: send at least one token", field="token_ids")
    vocabulary = range(ready.vocabulary_size)
    if max(submission.token_ids) not in vocabulary:
        raise InvalidRequest(f"token ids must be from 0 to {vocabulary[-1]}", field="token_ids")
    if len(submission.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"at most {MAX_STOP_TOKENS} stop tokens are taken", field="stop.token_ids")
    if any(token_id not in vocabulary for token_id in submission.stop_token_ids):
        raise InvalidRequest(f"stop token ids must be from 0 to {vocabulary[-1]}", field="stop.token_ids")
    tokens = len(submission.token_ids) + submission.max_tokens
    room = min(ready.context_tokens, ready.total_blocks * BLOCK_TOKENS)
    if tokens > room:
        raise ContextExceeded(
            f"{len(submission.token_ids)} prompt tokens and max_tokens {submission.max_tokens} make {tokens}, and this "
            f"worker has room for {room}: shorten the prompt or lower max_tokens",
            field="max_tokens",
        )


def _check_sampling(submission: Submission) -> None:
    sampling = submission.sampling
    if not isfinite(sampling.temperature) or sampling.temperature < 0:
        raise InvalidRequest("temperature must be a finite number, 0 or more", field="sampling.temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p must be more than 0 and at most 1", field="sampling.top_p")
    if sampling.top_logprobs is not None and sampling.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be at most {MAX_TOP_LOGPROBS}", field="sampling.top_logprobs")

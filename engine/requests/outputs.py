"""Outputs of one request."""

from collections.abc import Sequence

from engine.batch import Row, Sample
from engine.protocol.messages import Output, Refusal
from engine.requests.request import Request
from mesh.domain.outputs import FinishReason
from mesh.errors import MeshError


def commit(request: Request, row: Row, sample: Sample) -> Output:
    """Give the request what its row drew, up to the token that ends it, if that is among them."""
    if not (request.has_first_token or request.is_pushed):
        request.stages.enter("engine.decode")
    position = len(request.progress.token_ids)
    count, finish = _wanted(request, sample.token_ids)
    logprobs = None if sample.logprobs is None else [*sample.logprobs[:count]]
    output = Output(request.key, position, [*sample.token_ids[:count]], logprobs, None, finish)
    output.relaxed = sample.relaxed > 0
    if position == request.prompt_tokens:
        output.cached_tokens, output.store_cached_tokens = request.cached_tokens, request.store_cached_tokens
        output.drafts_end = request.progress.drafts_end
        if request.prompt_scores is not None:
            output.prompt_logprobs = request.prompt_scores.whole()
            request.prompt_scores = None
    request.progress.committed(row.tokens, row.draws, output.token_ids, sample.drafts)
    if request.masks is not None and finish is None:
        request.masks.follow(output.token_ids, sample.drafts[: request.most_drafts])
    return output


def _wanted(request: Request, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
    """How many of the next tokens the request takes, and how it ends with the last of them."""
    for count, token_id in enumerate(token_ids, start=1):
        if token_id in request.stop_token_ids:
            return count, FinishReason.STOP
    assert len(request.progress.token_ids) + len(token_ids) <= request.limit
    reached = len(request.progress.token_ids) + len(token_ids) == request.limit
    return len(token_ids), FinishReason.LENGTH if reached else None


def end_of(request: Request) -> Output | None:
    """The output, without tokens, of a request that has taken its last token; None if it goes on."""
    token_ids = request.progress.token_ids
    if token_ids[-1] in request.stop_token_ids:
        finish = FinishReason.STOP
    elif len(token_ids) == request.limit:
        finish = FinishReason.LENGTH
    else:
        return None
    return Output(request.key, len(token_ids), [], finish=finish)


def cancelled(request: Request) -> Output:
    return Output(request.key, len(request.progress.token_ids), [], finish=FinishReason.CANCELLED)


def refused(request: Request, error: MeshError) -> Output:
    return Output(request.key, len(request.progress.token_ids), [], refusal=Refusal(error.reason, error.message))

"""Outputs of one request."""

from engine.batch import Sample
from engine.protocol.messages import Output, Refusal
from engine.request import Request
from mesh.domain.outputs import FinishReason
from mesh.errors import MeshError


def next_output(request: Request, sample: Sample) -> Output:
    """A drawn token, not committed yet, which may be the request's last."""
    position, token_id = len(request.progress.token_ids), sample.token_id
    finish: FinishReason | None = None
    if token_id in request.stop_token_ids:
        finish = FinishReason.STOP
    elif position + 1 == request.limit:
        finish = FinishReason.LENGTH
    logprobs = None if sample.logprobs is None else [sample.logprobs]
    output = Output(request.key, position, [token_id], logprobs, None, finish)
    if position == request.prompt_tokens:
        output.cached_tokens, output.store_cached_tokens = request.cached_tokens, request.store_cached_tokens
    return output


def cancelled(request: Request) -> Output:
    return Output(request.key, len(request.progress.token_ids), [], finish=FinishReason.CANCELLED)


def refused(request: Request, error: MeshError) -> Output:
    return Output(request.key, len(request.progress.token_ids), [], refusal=Refusal(error.reason, error.message))

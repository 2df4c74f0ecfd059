"""Messages of PrefillService, in and out."""

from deepmesh.internal.v1 import prefill_pb2

from engine.protocol.messages import Output
from mesh.domain import wire
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import StopConditions
from prefill_svc.prompts import Event, Prompt
from transfer import wire as transfer_wire


def prompt(message: prefill_pb2.PrefillRequest, traceparent: str | None = None) -> Prompt:
    """The message as it is, under this span; admission checks it. Raises InvalidRequest for an invalid ticket."""
    return Prompt(
        request=TokenRequest(
            request_id=message.request_id,
            token_ids=list(message.token_ids),
            sampling=wire.sampling(message.sampling),
            stop=StopConditions(max_tokens=1, ignore_eos=True),
            cache_salt=message.cache_salt,
            attempt=message.attempt,
            prompt_tokens=message.prompt_tokens if message.HasField("prompt_tokens") else None,
            constraint=wire.constraint(message.constraint) if message.HasField("constraint") else None,
            share=wire.share(message.share),
            traceparent=traceparent,
            sparse=wire.sparse_prefill(message.sparse_prefill) if message.HasField("sparse_prefill") else None,
        ),
        ticket=transfer_wire.ticket(message.ticket),
        held_blocks=message.held_blocks,
        store=wire.store_target(message.store) if message.HasField("store") else None,
        rank=message.rank if message.HasField("rank") else None,
    )


def accepted(predicted_seconds: float) -> prefill_pb2.PrefillResponse:
    message = prefill_pb2.PrefillAccepted(predicted_ttft_ms=predicted_seconds * 1000)
    return prefill_pb2.PrefillResponse(accepted=message)


def response(event: Event) -> prefill_pb2.PrefillResponse:
    if isinstance(event, Output):
        return prefill_pb2.PrefillResponse(first_token=_first_token(event))
    done = prefill_pb2.PrefillDone(pushed_bytes=event.size_bytes, transport=event.transport)
    return prefill_pb2.PrefillResponse(done=done)


def _first_token(output: Output) -> prefill_pb2.PrefillFirstToken:
    scores, stored = output.prompt_logprobs, output.store_cached_tokens or 0
    return prefill_pb2.PrefillFirstToken(
        token_id=output.token_ids[0],
        logprobs=wire.logprobs_message(output.logprobs[0]) if output.logprobs else None,
        worker_cached_tokens=(output.cached_tokens or 0) - stored,
        store_cached_tokens=stored,
        host_cached_tokens=output.host_cached_tokens or 0,
        prompt_logprobs=None if scores is None else wire.prompt_logprobs_message(scores),
        drafts_end=output.drafts_end,
    )

"""Messages of DecodeService, in and out, and of PrefillService, out and in."""

from deepmesh.internal.v1 import decode_pb2, prefill_pb2

from decode_svc.requests import OutputSlice
from decode_svc.session import Frame
from decode_svc.stream_logs import StreamLog
from engine.protocol.messages import LandingOpened, Output
from mesh.domain import wire
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import Submission
from mesh.domain.worker_wire import check_name, identity_message
from mesh.domain.workers import WorkerIdentity
from mesh.rpc.failures import to_failure
from transfer import wire as transfer_wire


def check_hello(hello: decode_pb2.AttachHello) -> None:
    """Raises InvalidRequest."""
    for field in ("gateway_id", "gateway_incarnation"):
        check_name(f"hello.{field}", getattr(hello, field))


def resume_points(hello: decode_pb2.AttachHello) -> dict[int, int]:
    """The position of the first token that the gateway lacks, by stream id."""
    return {point.stream_id: point.next_position for point in hello.resume}


def welcome(identity: WorkerIdentity, grace_seconds: float) -> decode_pb2.AttachResponse:
    message = decode_pb2.AttachWelcome(identity=identity_message(identity), grace_ms=int(grace_seconds * 1000))
    return decode_pb2.AttachResponse(welcome=message)


def step_frame(frame: Frame) -> decode_pb2.AttachResponse:
    response = decode_pb2.AttachResponse()
    response.frame.step = frame.step
    add = response.frame.outputs.add
    for output in frame.outputs:
        # Set field by field: this runs once per token, and keyword arguments take twice as long.
        message = add()
        message.stream_id = output.stream_id
        message.attempt = output.attempt
        message.first_position = output.first_position
        message.token_ids.extend(output.token_ids)
        # Few outputs have any of these; most have one token and nothing else.
        if output.logprobs or output.cached is not None or output.terminal is not None or output.relaxed:
            _add_rest(message, output)
    return response


def taken_stream(log: StreamLog) -> decode_pb2.TakeStreamResponse:
    request = log.request
    output = decode_pb2.RequestOutput(
        stream_id=request.stream_id,
        attempt=request.attempt,
        first_position=request.prompt_tokens,
        token_ids=request.token_ids,
        relaxed=request.relaxed,
    )
    if isinstance(request.terminal, FinishReason):
        output.finished = wire.finish_reason_number(request.terminal)
    return decode_pb2.TakeStreamResponse(submission=wire.submission_message(log.submission), output=output)


def prefill_request(submission: Submission, opened: LandingOpened) -> prefill_pb2.PrefillRequest:
    store = None if submission.store is None else wire.store_target_message(submission.store)
    constraint, sparse = submission.request.constraint, submission.request.sparse
    return prefill_pb2.PrefillRequest(
        request_id=submission.request.request_id,
        attempt=submission.request.attempt,
        token_ids=submission.request.token_ids,
        sampling=wire.sampling_message(submission.request.sampling),
        cache_salt=submission.request.cache_salt,
        ticket=transfer_wire.ticket_message(opened.ticket),
        held_blocks=opened.held_blocks,
        prompt_tokens=submission.request.prompt_tokens,
        share=wire.share_message(submission.request.share),
        store=store,
        constraint=None if constraint is None else wire.constraint_message(constraint),
        sparse_prefill=None if sparse is None else wire.sparse_prefill_message(sparse),
        rank=submission.prefill_rank,
    )


def first_output(key: int, position: int, first: prefill_pb2.PrefillFirstToken) -> Output:
    return Output(
        key=key,
        first_position=position,
        token_ids=[first.token_id],
        logprobs=[wire.logprobs(first.logprobs)] if first.HasField("logprobs") else None,
        cached_tokens=first.worker_cached_tokens + first.store_cached_tokens,
        store_cached_tokens=first.store_cached_tokens,
        host_cached_tokens=first.host_cached_tokens,
        prompt_logprobs=wire.prompt_logprobs(first.prompt_logprobs) if first.HasField("prompt_logprobs") else None,
        drafts_end=first.drafts_end if first.HasField("drafts_end") else None,
    )


def _add_rest(message: decode_pb2.RequestOutput, output: OutputSlice) -> None:
    if output.logprobs:
        message.logprobs.extend(wire.logprobs_message(each) for each in output.logprobs)
    if output.cached is not None:
        message.cached_tokens = output.cached.tokens
        message.host_cached_tokens = output.cached.from_host
        message.store_cached_tokens = output.cached.from_stores
    if isinstance(output.terminal, FinishReason):
        message.finished = wire.finish_reason_number(output.terminal)
    elif output.terminal is not None:
        message.failure.CopyFrom(to_failure(output.terminal))
    message.relaxed = output.relaxed
    if output.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(wire.prompt_logprobs_message(output.prompt_logprobs))

"""Messages of DecodeService in and out."""

from collections.abc import Sequence

from deepmesh.v1 import common_pb2, decode_pb2

from decode_svc.requests import Finish, OutputSlice, Submission
from decode_svc.session import Frame
from engine.messages import Logprobs, Sampling
from mesh.failures import to_failure
from mesh.worker_wire import check_name, identity_message
from mesh.workers import WorkerIdentity

_FINISH_REASONS = {
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    Finish.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}


def check_hello(hello: decode_pb2.AttachHello) -> None:
    """Raises InvalidRequest."""
    for field in ("gateway_id", "gateway_incarnation"):
        check_name(f"hello.{field}", getattr(hello, field))


def resume_points(hello: decode_pb2.AttachHello) -> dict[int, int]:
    """By stream id, the position of the first token that the gateway lacks."""
    return {point.stream_id: point.next_position for point in hello.resume}


def submission(message: decode_pb2.Submission) -> Submission:
    """The message as it is; admission judges it."""
    return Submission(
        stream_id=message.stream_id,
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=list(message.token_ids),
        sampling=_sampling(message.sampling),
        max_tokens=message.stop.max_tokens,
        stop_token_ids=list(message.stop.token_ids),
        ignore_eos=message.stop.ignore_eos,
        cache_salt=message.cache_salt,
        deadline_ms=message.deadline_ms or None,
        prefill_elsewhere=message.HasField("prefill"),
    )


def welcome(identity: WorkerIdentity, grace_seconds: float) -> decode_pb2.AttachResponse:
    message = decode_pb2.AttachWelcome(identity=identity_message(identity), grace_ms=int(grace_seconds * 1000))
    return decode_pb2.AttachResponse(welcome=message)


def step_frame(frame: Frame) -> decode_pb2.AttachResponse:
    response = decode_pb2.AttachResponse()
    response.frame.step = frame.step
    add = response.frame.outputs.add
    for output in frame.outputs:
        # Field by field: half the time of keyword arguments, for what happens once a token.
        message = add()
        message.stream_id = output.stream_id
        message.attempt = output.attempt
        message.first_position = output.first_position
        message.token_ids.extend(output.token_ids)
        # Few outputs have any of these; most have one token and nothing else.
        if output.logprobs or output.cached_tokens is not None or output.terminal is not None:
            _add_rest(message, output)
    return response


def _sampling(message: common_pb2.SamplingParams) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def _add_rest(message: decode_pb2.RequestOutput, output: OutputSlice) -> None:
    if output.logprobs:
        message.logprobs.extend(_logprobs(output.logprobs))
    if output.cached_tokens is not None:
        message.cached_tokens = output.cached_tokens
    if isinstance(output.terminal, Finish):
        message.finished = _FINISH_REASONS[output.terminal]
    elif output.terminal is not None:
        message.failure.CopyFrom(to_failure(output.terminal))


def _logprobs(positions: Sequence[Logprobs]) -> list[common_pb2.PositionLogprobs]:
    return [
        common_pb2.PositionLogprobs(
            logprob=position.logprob,
            top=[
                common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(position.top_token_ids, position.top_logprobs, strict=True)
            ],
        )
        for position in positions
    ]

from deepmesh.internal.v1 import constraint_pb2 as _constraint_pb2
from deepmesh.internal.v1 import failure_pb2 as _failure_pb2
from deepmesh.internal.v1 import outputs_pb2 as _outputs_pb2
from deepmesh.internal.v1 import share_pb2 as _share_pb2
from deepmesh.internal.v1 import sparse_prefill_pb2 as _sparse_prefill_pb2
from deepmesh.internal.v1 import targets_pb2 as _targets_pb2
from deepmesh.internal.v1 import workers_pb2 as _workers_pb2
from deepmesh.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submission", "cancellation", "acknowledgement")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    CANCELLATION_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    submission: Submission
    cancellation: Cancellation
    acknowledgement: Acknowledgement
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., submission: _Optional[_Union[Submission, _Mapping]] = ..., cancellation: _Optional[_Union[Cancellation, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("gateway_id", "gateway_incarnation", "resume")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    gateway_incarnation: str
    resume: _containers.RepeatedCompositeFieldContainer[ResumePoint]
    def __init__(self, gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[str] = ..., resume: _Optional[_Iterable[_Union[ResumePoint, _Mapping]]] = ...) -> None: ...

class ResumePoint(_message.Message):
    __slots__ = ("stream_id", "next_position")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    next_position: int
    def __init__(self, stream_id: _Optional[int] = ..., next_position: _Optional[int] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("stream_id", "request_id", "attempt", "token_ids", "sampling", "stop", "cache_salt", "deadline_ms", "prefill", "store", "prompt_tokens", "constraint", "share", "traceparent", "stream", "sparse_prefill", "rank", "prefill_rank")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    stop: StopConditions
    cache_salt: bytes
    deadline_ms: int
    prefill: _targets_pb2.WorkerTarget
    store: _targets_pb2.StoreTarget
    prompt_tokens: int
    constraint: _constraint_pb2.Constraint
    share: _share_pb2.Share
    traceparent: str
    stream: StreamTag
    sparse_prefill: _sparse_prefill_pb2.SparsePrefill
    rank: int
    prefill_rank: int
    def __init__(self, stream_id: _Optional[int] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., prefill: _Optional[_Union[_targets_pb2.WorkerTarget, _Mapping]] = ..., store: _Optional[_Union[_targets_pb2.StoreTarget, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., constraint: _Optional[_Union[_constraint_pb2.Constraint, _Mapping]] = ..., share: _Optional[_Union[_share_pb2.Share, _Mapping]] = ..., traceparent: _Optional[str] = ..., stream: _Optional[_Union[StreamTag, _Mapping]] = ..., sparse_prefill: _Optional[_Union[_sparse_prefill_pb2.SparsePrefill, _Mapping]] = ..., rank: _Optional[int] = ..., prefill_rank: _Optional[int] = ...) -> None: ...

class StreamTag(_message.Message):
    __slots__ = ("stream_id", "epoch", "context")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    stream_id: bytes
    epoch: int
    context: bytes
    def __init__(self, stream_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., context: _Optional[bytes] = ...) -> None: ...

class TakeStreamRequest(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: bytes
    def __init__(self, stream_id: _Optional[bytes] = ...) -> None: ...

class TakeStreamResponse(_message.Message):
    __slots__ = ("submission", "output")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    submission: Submission
    output: RequestOutput
    def __init__(self, submission: _Optional[_Union[Submission, _Mapping]] = ..., output: _Optional[_Union[RequestOutput, _Mapping]] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Cancellation(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    def __init__(self, stream_id: _Optional[int] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("stream_ids",)
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "frame")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    welcome: AttachWelcome
    frame: StepFrame
    def __init__(self, welcome: _Optional[_Union[AttachWelcome, _Mapping]] = ..., frame: _Optional[_Union[StepFrame, _Mapping]] = ...) -> None: ...

class AttachWelcome(_message.Message):
    __slots__ = ("identity", "grace_ms")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    identity: _workers_pb2.WorkerIdentity
    grace_ms: int
    def __init__(self, identity: _Optional[_Union[_workers_pb2.WorkerIdentity, _Mapping]] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "outputs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("stream_id", "attempt", "first_position", "token_ids", "logprobs", "cached_tokens", "finished", "failure", "relaxed", "prompt_logprobs", "host_cached_tokens", "store_cached_tokens")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    attempt: int
    first_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    cached_tokens: int
    finished: _common_pb2.FinishReason
    failure: _failure_pb2.Failure
    relaxed: bool
    prompt_logprobs: _outputs_pb2.PromptLogprobs
    host_cached_tokens: int
    store_cached_tokens: int
    def __init__(self, stream_id: _Optional[int] = ..., attempt: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., finished: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., relaxed: _Optional[bool] = ..., prompt_logprobs: _Optional[_Union[_outputs_pb2.PromptLogprobs, _Mapping]] = ..., host_cached_tokens: _Optional[int] = ..., store_cached_tokens: _Optional[int] = ...) -> None: ...

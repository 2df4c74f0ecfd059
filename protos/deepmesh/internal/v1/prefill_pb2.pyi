from deepmesh.internal.v1 import constraint_pb2 as _constraint_pb2
from deepmesh.internal.v1 import landing_pb2 as _landing_pb2
from deepmesh.internal.v1 import outputs_pb2 as _outputs_pb2
from deepmesh.internal.v1 import share_pb2 as _share_pb2
from deepmesh.internal.v1 import sparse_prefill_pb2 as _sparse_prefill_pb2
from deepmesh.internal.v1 import targets_pb2 as _targets_pb2
from deepmesh.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "sampling", "cache_salt", "ticket", "held_blocks", "store", "prompt_tokens", "constraint", "share", "sparse_prefill", "rank")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    cache_salt: bytes
    ticket: _landing_pb2.LandingTicket
    held_blocks: int
    store: _targets_pb2.StoreTarget
    prompt_tokens: int
    constraint: _constraint_pb2.Constraint
    share: _share_pb2.Share
    sparse_prefill: _sparse_prefill_pb2.SparsePrefill
    rank: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., ticket: _Optional[_Union[_landing_pb2.LandingTicket, _Mapping]] = ..., held_blocks: _Optional[int] = ..., store: _Optional[_Union[_targets_pb2.StoreTarget, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., constraint: _Optional[_Union[_constraint_pb2.Constraint, _Mapping]] = ..., share: _Optional[_Union[_share_pb2.Share, _Mapping]] = ..., sparse_prefill: _Optional[_Union[_sparse_prefill_pb2.SparsePrefill, _Mapping]] = ..., rank: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("accepted", "first_token", "done")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    first_token: PrefillFirstToken
    done: PrefillDone
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("predicted_ttft_ms",)
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    predicted_ttft_ms: float
    def __init__(self, predicted_ttft_ms: _Optional[float] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "worker_cached_tokens", "store_cached_tokens", "prompt_logprobs", "drafts_end", "host_cached_tokens")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WORKER_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_END_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _common_pb2.PositionLogprobs
    worker_cached_tokens: int
    store_cached_tokens: int
    prompt_logprobs: _outputs_pb2.PromptLogprobs
    drafts_end: int
    host_cached_tokens: int
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PositionLogprobs, _Mapping]] = ..., worker_cached_tokens: _Optional[int] = ..., store_cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_outputs_pb2.PromptLogprobs, _Mapping]] = ..., drafts_end: _Optional[int] = ..., host_cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("pushed_bytes", "transport")
    PUSHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    pushed_bytes: int
    transport: str
    def __init__(self, pushed_bytes: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

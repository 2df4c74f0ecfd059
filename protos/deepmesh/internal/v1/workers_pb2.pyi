from deepmesh.internal.v1 import sparse_prefill_pb2 as _sparse_prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_SERVING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_STALLED: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_STALLED: WorkerState

class KvNamespace(_message.Message):
    __slots__ = ("weights_fingerprint", "dtype", "scale", "layers", "block_tokens", "layout", "draft_layers")
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    weights_fingerprint: str
    dtype: str
    scale: float
    layers: int
    block_tokens: int
    layout: str
    draft_layers: int
    def __init__(self, weights_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., scale: _Optional[float] = ..., layers: _Optional[int] = ..., block_tokens: _Optional[int] = ..., layout: _Optional[str] = ..., draft_layers: _Optional[int] = ...) -> None: ...

class WorkerIdentity(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "endpoint", "model", "kv_namespace", "context_tokens", "total_blocks", "max_requests", "can_prefill", "vocabulary_size", "block_bytes", "receives_kv", "layerwise_tokens", "slot_bytes", "ranks", "worker_class", "sparse_prefill", "max_step_tokens", "prompt_wait_steps", "divided_tokens", "speed")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CAN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVES_KV_FIELD_NUMBER: _ClassVar[int]
    LAYERWISE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORKER_CLASS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_WAIT_STEPS_FIELD_NUMBER: _ClassVar[int]
    DIVIDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: WorkerRole
    endpoint: str
    model: str
    kv_namespace: KvNamespace
    context_tokens: int
    total_blocks: int
    max_requests: int
    can_prefill: bool
    vocabulary_size: int
    block_bytes: int
    receives_kv: bool
    layerwise_tokens: int
    slot_bytes: int
    ranks: int
    worker_class: str
    sparse_prefill: _sparse_prefill_pb2.SparsePrefill
    max_step_tokens: int
    prompt_wait_steps: int
    divided_tokens: int
    speed: WorkerSpeed
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., endpoint: _Optional[str] = ..., model: _Optional[str] = ..., kv_namespace: _Optional[_Union[KvNamespace, _Mapping]] = ..., context_tokens: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_requests: _Optional[int] = ..., can_prefill: _Optional[bool] = ..., vocabulary_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., receives_kv: _Optional[bool] = ..., layerwise_tokens: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., ranks: _Optional[int] = ..., worker_class: _Optional[str] = ..., sparse_prefill: _Optional[_Union[_sparse_prefill_pb2.SparsePrefill, _Mapping]] = ..., max_step_tokens: _Optional[int] = ..., prompt_wait_steps: _Optional[int] = ..., divided_tokens: _Optional[int] = ..., speed: _Optional[_Union[WorkerSpeed, _Mapping]] = ...) -> None: ...

class WorkerSpeed(_message.Message):
    __slots__ = ("decode_step_ms", "decode_step_requests", "prompts")
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    decode_step_ms: float
    decode_step_requests: float
    prompts: PromptPace
    def __init__(self, decode_step_ms: _Optional[float] = ..., decode_step_requests: _Optional[float] = ..., prompts: _Optional[_Union[PromptPace, _Mapping]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "queued_prefill_tokens", "free_blocks", "prefill_tokens_per_second", "decode_step_ms", "mean_output_tokens", "decode_step_requests", "push_bytes_per_second", "expert_imbalance", "experts_moved", "exact_prompts", "sparse_prompts", "queued_sparse_tokens", "waiting_blocks", "host_tier", "even_step_tokens")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    MEAN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PUSH_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    EXACT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SPARSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_FIELD_NUMBER: _ClassVar[int]
    EVEN_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    free_blocks: int
    prefill_tokens_per_second: float
    decode_step_ms: float
    mean_output_tokens: float
    decode_step_requests: float
    push_bytes_per_second: float
    expert_imbalance: float
    experts_moved: int
    exact_prompts: PromptPace
    sparse_prompts: PromptPace
    queued_sparse_tokens: int
    waiting_blocks: int
    host_tier: HostTierStatus
    even_step_tokens: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_step_ms: _Optional[float] = ..., mean_output_tokens: _Optional[float] = ..., decode_step_requests: _Optional[float] = ..., push_bytes_per_second: _Optional[float] = ..., expert_imbalance: _Optional[float] = ..., experts_moved: _Optional[int] = ..., exact_prompts: _Optional[_Union[PromptPace, _Mapping]] = ..., sparse_prompts: _Optional[_Union[PromptPace, _Mapping]] = ..., queued_sparse_tokens: _Optional[int] = ..., waiting_blocks: _Optional[int] = ..., host_tier: _Optional[_Union[HostTierStatus, _Mapping]] = ..., even_step_tokens: _Optional[int] = ...) -> None: ...

class HostTierStatus(_message.Message):
    __slots__ = ("total_blocks", "used_blocks", "written_blocks", "read_blocks", "read_bytes_per_second")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    used_blocks: int
    written_blocks: int
    read_blocks: int
    read_bytes_per_second: float
    def __init__(self, total_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., written_blocks: _Optional[int] = ..., read_blocks: _Optional[int] = ..., read_bytes_per_second: _Optional[float] = ...) -> None: ...

class PromptPace(_message.Message):
    __slots__ = ("tokens_per_second", "context_tokens", "step_tokens")
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens_per_second: float
    context_tokens: float
    step_tokens: float
    def __init__(self, tokens_per_second: _Optional[float] = ..., context_tokens: _Optional[float] = ..., step_tokens: _Optional[float] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("load", "transfers", "cached_blocks")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    load: WorkerLoad
    transfers: TransferStatus
    cached_blocks: int
    def __init__(self, load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., transfers: _Optional[_Union[TransferStatus, _Mapping]] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class TransferStatus(_message.Message):
    __slots__ = ("open_landings", "open_pushes", "open_fetches", "total_slots", "free_slots", "quarantined_slots", "received_bytes", "sent_bytes", "refused", "fetches", "fetched_blocks", "fetch_bytes_per_second", "disk_fetch_bytes_per_second")
    class ReceivedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SentBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OPEN_LANDINGS_FIELD_NUMBER: _ClassVar[int]
    OPEN_PUSHES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FETCHES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCH_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DISK_FETCH_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    open_landings: int
    open_pushes: int
    open_fetches: int
    total_slots: int
    free_slots: int
    quarantined_slots: int
    received_bytes: _containers.ScalarMap[str, int]
    sent_bytes: _containers.ScalarMap[str, int]
    refused: _containers.ScalarMap[str, int]
    fetches: int
    fetched_blocks: int
    fetch_bytes_per_second: float
    disk_fetch_bytes_per_second: float
    def __init__(self, open_landings: _Optional[int] = ..., open_pushes: _Optional[int] = ..., open_fetches: _Optional[int] = ..., total_slots: _Optional[int] = ..., free_slots: _Optional[int] = ..., quarantined_slots: _Optional[int] = ..., received_bytes: _Optional[_Mapping[str, int]] = ..., sent_bytes: _Optional[_Mapping[str, int]] = ..., refused: _Optional[_Mapping[str, int]] = ..., fetches: _Optional[int] = ..., fetched_blocks: _Optional[int] = ..., fetch_bytes_per_second: _Optional[float] = ..., disk_fetch_bytes_per_second: _Optional[float] = ...) -> None: ...

import datetime

from deepmesh.internal.v1 import kvstore_pb2 as _kvstore_pb2
from deepmesh.internal.v1 import share_pb2 as _share_pb2
from deepmesh.internal.v1 import sparse_prefill_pb2 as _sparse_prefill_pb2
from deepmesh.internal.v1 import targets_pb2 as _targets_pb2
from deepmesh.internal.v1 import workers_pb2 as _workers_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlacementOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_OUTCOME_UNSPECIFIED: _ClassVar[PlacementOutcome]
    PLACEMENT_OUTCOME_FINISHED: _ClassVar[PlacementOutcome]
    PLACEMENT_OUTCOME_CANCELLED: _ClassVar[PlacementOutcome]
    PLACEMENT_OUTCOME_REFUSED: _ClassVar[PlacementOutcome]
    PLACEMENT_OUTCOME_LOST: _ClassVar[PlacementOutcome]
    PLACEMENT_OUTCOME_FAILED: _ClassVar[PlacementOutcome]
PLACEMENT_OUTCOME_UNSPECIFIED: PlacementOutcome
PLACEMENT_OUTCOME_FINISHED: PlacementOutcome
PLACEMENT_OUTCOME_CANCELLED: PlacementOutcome
PLACEMENT_OUTCOME_REFUSED: PlacementOutcome
PLACEMENT_OUTCOME_LOST: PlacementOutcome
PLACEMENT_OUTCOME_FAILED: PlacementOutcome

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "model", "prompt_tokens", "max_tokens", "block_hashes", "avoid_worker_ids", "share", "generation_id", "sparse_prefill")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    AVOID_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    model: str
    prompt_tokens: int
    max_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    avoid_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    share: _share_pb2.Share
    generation_id: str
    sparse_prefill: _sparse_prefill_pb2.SparsePrefill
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., avoid_worker_ids: _Optional[_Iterable[str]] = ..., share: _Optional[_Union[_share_pb2.Share, _Mapping]] = ..., generation_id: _Optional[str] = ..., sparse_prefill: _Optional[_Union[_sparse_prefill_pb2.SparsePrefill, _Mapping]] = ...) -> None: ...

class PlaceResponse(_message.Message):
    __slots__ = ("decode", "prefill", "cached_prefixes", "predicted_ttft_ms", "predicted_tpot_ms", "reason", "store", "decode_rank", "prefill_rank")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    decode: _targets_pb2.WorkerTarget
    prefill: _targets_pb2.WorkerTarget
    cached_prefixes: _containers.RepeatedCompositeFieldContainer[CachedPrefix]
    predicted_ttft_ms: float
    predicted_tpot_ms: float
    reason: str
    store: _targets_pb2.StoreTarget
    decode_rank: int
    prefill_rank: int
    def __init__(self, decode: _Optional[_Union[_targets_pb2.WorkerTarget, _Mapping]] = ..., prefill: _Optional[_Union[_targets_pb2.WorkerTarget, _Mapping]] = ..., cached_prefixes: _Optional[_Iterable[_Union[CachedPrefix, _Mapping]]] = ..., predicted_ttft_ms: _Optional[float] = ..., predicted_tpot_ms: _Optional[float] = ..., reason: _Optional[str] = ..., store: _Optional[_Union[_targets_pb2.StoreTarget, _Mapping]] = ..., decode_rank: _Optional[int] = ..., prefill_rank: _Optional[int] = ...) -> None: ...

class CachedPrefix(_message.Message):
    __slots__ = ("source_id", "blocks")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    blocks: int
    def __init__(self, source_id: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "worker_id", "outcome", "output_tokens", "cached_tokens", "ttft_ms", "tpot_ms", "generation_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    worker_id: str
    outcome: PlacementOutcome
    output_tokens: int
    cached_tokens: int
    ttft_ms: float
    tpot_ms: float
    generation_id: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., worker_id: _Optional[str] = ..., outcome: _Optional[_Union[PlacementOutcome, str]] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., generation_id: _Optional[str] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportStatusRequest(_message.Message):
    __slots__ = ("identity", "state", "load", "kv_events", "transfers", "leaving", "ranks")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    identity: _workers_pb2.WorkerIdentity
    state: _workers_pb2.WorkerState
    load: _workers_pb2.WorkerLoad
    kv_events: KvEvents
    transfers: _workers_pb2.TransferStatus
    leaving: bool
    ranks: _containers.RepeatedCompositeFieldContainer[_workers_pb2.RankStatus]
    def __init__(self, identity: _Optional[_Union[_workers_pb2.WorkerIdentity, _Mapping]] = ..., state: _Optional[_Union[_workers_pb2.WorkerState, str]] = ..., load: _Optional[_Union[_workers_pb2.WorkerLoad, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., transfers: _Optional[_Union[_workers_pb2.TransferStatus, _Mapping]] = ..., leaving: _Optional[bool] = ..., ranks: _Optional[_Iterable[_Union[_workers_pb2.RankStatus, _Mapping]]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("snapshot", "stored", "removed", "holders", "host_holders")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    HOST_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    holders: _containers.RepeatedScalarFieldContainer[int]
    host_holders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, snapshot: _Optional[bool] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., holders: _Optional[_Iterable[int]] = ..., host_holders: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportStatusResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _duration_pb2.Duration
    def __init__(self, lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWorkersResponse(_message.Message):
    __slots__ = ("workers", "lease", "stores")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    lease: _duration_pb2.Duration
    stores: _containers.RepeatedCompositeFieldContainer[StoreStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stores: _Optional[_Iterable[_Union[StoreStatus, _Mapping]]] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("endpoint", "store_id", "tiers", "lookups", "hits", "transfers", "attached_workers")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    store_id: str
    tiers: _containers.RepeatedCompositeFieldContainer[_kvstore_pb2.TierStatus]
    lookups: int
    hits: int
    transfers: _workers_pb2.TransferStatus
    attached_workers: int
    def __init__(self, endpoint: _Optional[str] = ..., store_id: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[_kvstore_pb2.TierStatus, _Mapping]]] = ..., lookups: _Optional[int] = ..., hits: _Optional[int] = ..., transfers: _Optional[_Union[_workers_pb2.TransferStatus, _Mapping]] = ..., attached_workers: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("identity", "state", "load", "cached_blocks", "lease_remaining", "transfers", "ranks", "silent")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    identity: _workers_pb2.WorkerIdentity
    state: _workers_pb2.WorkerState
    load: _workers_pb2.WorkerLoad
    cached_blocks: int
    lease_remaining: _duration_pb2.Duration
    transfers: _workers_pb2.TransferStatus
    ranks: _containers.RepeatedCompositeFieldContainer[_workers_pb2.RankStatus]
    silent: bool
    def __init__(self, identity: _Optional[_Union[_workers_pb2.WorkerIdentity, _Mapping]] = ..., state: _Optional[_Union[_workers_pb2.WorkerState, str]] = ..., load: _Optional[_Union[_workers_pb2.WorkerLoad, _Mapping]] = ..., cached_blocks: _Optional[int] = ..., lease_remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., transfers: _Optional[_Union[_workers_pb2.TransferStatus, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[_workers_pb2.RankStatus, _Mapping]]] = ..., silent: _Optional[bool] = ...) -> None: ...

class ListDecisionsRequest(_message.Message):
    __slots__ = ("limit", "request_id")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    limit: int
    request_id: str
    def __init__(self, limit: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ListDecisionsResponse(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("time", "request_id", "attempt", "worker_id", "reason", "candidates", "outcome")
    TIME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    request_id: str
    attempt: int
    worker_id: str
    reason: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    outcome: PlacementOutcome
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., worker_id: _Optional[str] = ..., reason: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., outcome: _Optional[_Union[PlacementOutcome, str]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "cached_blocks", "predicted_ttft_ms", "predicted_tpot_ms", "slots_left", "rejected", "prefill_worker_id", "store_id", "rank")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    cached_blocks: int
    predicted_ttft_ms: float
    predicted_tpot_ms: float
    slots_left: int
    rejected: str
    prefill_worker_id: str
    store_id: str
    rank: int
    def __init__(self, worker_id: _Optional[str] = ..., cached_blocks: _Optional[int] = ..., predicted_ttft_ms: _Optional[float] = ..., predicted_tpot_ms: _Optional[float] = ..., slots_left: _Optional[int] = ..., rejected: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., store_id: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class GetScalingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScalingResponse(_message.Message):
    __slots__ = ("roles",)
    ROLES_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedCompositeFieldContainer[RoleScaling]
    def __init__(self, roles: _Optional[_Iterable[_Union[RoleScaling, _Mapping]]] = ...) -> None: ...

class RoleScaling(_message.Message):
    __slots__ = ("model", "role", "serving_replicas", "wanted_replicas", "reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SERVING_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WANTED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _workers_pb2.WorkerRole
    serving_replicas: int
    wanted_replicas: int
    reason: str
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_workers_pb2.WorkerRole, str]] = ..., serving_replicas: _Optional[int] = ..., wanted_replicas: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

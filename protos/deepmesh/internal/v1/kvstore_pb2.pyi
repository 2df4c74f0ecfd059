import datetime

from deepmesh.internal.v1 import landing_pb2 as _landing_pb2
from deepmesh.internal.v1 import workers_pb2 as _workers_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachWorkerRequest(_message.Message):
    __slots__ = ("worker", "session_id", "rank")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    worker: _workers_pb2.WorkerIdentity
    session_id: int
    rank: int
    def __init__(self, worker: _Optional[_Union[_workers_pb2.WorkerIdentity, _Mapping]] = ..., session_id: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class AttachWorkerResponse(_message.Message):
    __slots__ = ("store_id", "epoch", "worker_address", "session_id", "session_key", "lease", "slab")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    epoch: str
    worker_address: bytes
    session_id: int
    session_key: bytes
    lease: _duration_pb2.Duration
    slab: MappableSlab
    def __init__(self, store_id: _Optional[str] = ..., epoch: _Optional[str] = ..., worker_address: _Optional[bytes] = ..., session_id: _Optional[int] = ..., session_key: _Optional[bytes] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., slab: _Optional[_Union[MappableSlab, _Mapping]] = ...) -> None: ...

class MappableSlab(_message.Message):
    __slots__ = ("host", "name", "process_id", "descriptor", "layers", "blocks", "piece_bytes")
    HOST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    host: str
    name: str
    process_id: int
    descriptor: int
    layers: int
    blocks: int
    piece_bytes: int
    def __init__(self, host: _Optional[str] = ..., name: _Optional[str] = ..., process_id: _Optional[int] = ..., descriptor: _Optional[int] = ..., layers: _Optional[int] = ..., blocks: _Optional[int] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class MatchPrefixRequest(_message.Message):
    __slots__ = ("kv_namespace", "block_hashes")
    KV_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    kv_namespace: _workers_pb2.KvNamespace
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kv_namespace: _Optional[_Union[_workers_pb2.KvNamespace, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MatchPrefixResponse(_message.Message):
    __slots__ = ("blocks", "epoch", "store_id", "disk_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    epoch: str
    store_id: str
    disk_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., epoch: _Optional[str] = ..., store_id: _Optional[str] = ..., disk_blocks: _Optional[int] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("session_id", "parent_hash", "block_hashes", "tenant", "without_drafts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    parent_hash: bytes
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tenant: bytes
    without_drafts: bool
    def __init__(self, session_id: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., tenant: _Optional[bytes] = ..., without_drafts: _Optional[bool] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("ticket", "wanted", "parent_missing")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    PARENT_MISSING_FIELD_NUMBER: _ClassVar[int]
    ticket: _landing_pb2.LandingTicket
    wanted: _containers.RepeatedScalarFieldContainer[int]
    parent_missing: bool
    def __init__(self, ticket: _Optional[_Union[_landing_pb2.LandingTicket, _Mapping]] = ..., wanted: _Optional[_Iterable[int]] = ..., parent_missing: _Optional[bool] = ...) -> None: ...

class ConfirmOfferRequest(_message.Message):
    __slots__ = ("session_id", "transfer_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    transfer_id: bytes
    def __init__(self, session_id: _Optional[int] = ..., transfer_id: _Optional[bytes] = ...) -> None: ...

class ConfirmOfferResponse(_message.Message):
    __slots__ = ("stored_blocks",)
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    stored_blocks: int
    def __init__(self, stored_blocks: _Optional[int] = ...) -> None: ...

class WithdrawOfferRequest(_message.Message):
    __slots__ = ("session_id", "transfer_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    transfer_id: bytes
    def __init__(self, session_id: _Optional[int] = ..., transfer_id: _Optional[bytes] = ...) -> None: ...

class WithdrawOfferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("store_id", "epoch", "tiers", "lookups", "hits", "transfers", "attached_workers")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    epoch: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    lookups: int
    hits: int
    transfers: _workers_pb2.TransferStatus
    attached_workers: int
    def __init__(self, store_id: _Optional[str] = ..., epoch: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., lookups: _Optional[int] = ..., hits: _Optional[int] = ..., transfers: _Optional[_Union[_workers_pb2.TransferStatus, _Mapping]] = ..., attached_workers: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "total_blocks", "used_blocks", "block_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    total_blocks: int
    used_blocks: int
    block_bytes: int
    def __init__(self, name: _Optional[str] = ..., total_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

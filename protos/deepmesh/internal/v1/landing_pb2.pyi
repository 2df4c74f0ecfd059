from deepmesh.internal.v1 import workers_pb2 as _workers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LandingTicket(_message.Message):
    __slots__ = ("transfer_id", "attempt", "secret", "deadline_ms", "kv_namespace", "segments", "tag")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    KV_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    attempt: int
    secret: bytes
    deadline_ms: int
    kv_namespace: _workers_pb2.KvNamespace
    segments: _containers.RepeatedCompositeFieldContainer[LandingSegment]
    tag: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., secret: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., kv_namespace: _Optional[_Union[_workers_pb2.KvNamespace, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[LandingSegment, _Mapping]]] = ..., tag: _Optional[int] = ...) -> None: ...

class LandingSegment(_message.Message):
    __slots__ = ("index", "destination_rank", "worker_address", "first_layer", "layer_count", "first_block", "block_count", "size_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    destination_rank: int
    worker_address: bytes
    first_layer: int
    layer_count: int
    first_block: int
    block_count: int
    size_bytes: int
    def __init__(self, index: _Optional[int] = ..., destination_rank: _Optional[int] = ..., worker_address: _Optional[bytes] = ..., first_layer: _Optional[int] = ..., layer_count: _Optional[int] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerTarget(_message.Message):
    __slots__ = ("worker_id", "incarnation", "endpoint", "slot_bytes", "draft_layers")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    endpoint: str
    slot_bytes: int
    draft_layers: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., endpoint: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., draft_layers: _Optional[int] = ...) -> None: ...

class StoreTarget(_message.Message):
    __slots__ = ("store_id", "blocks")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    blocks: int
    def __init__(self, store_id: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

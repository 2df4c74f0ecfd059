import datetime

from deepmesh.internal.v1 import workers_pb2 as _workers_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role", "drain", "may_reload")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    MAY_RELOAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _workers_pb2.WorkerRole
    drain: _duration_pb2.Duration
    may_reload: bool
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_workers_pb2.WorkerRole, str]] = ..., drain: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., may_reload: _Optional[bool] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ("reloads",)
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    reloads: bool
    def __init__(self, reloads: _Optional[bool] = ...) -> None: ...

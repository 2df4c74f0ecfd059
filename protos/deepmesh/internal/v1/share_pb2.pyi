from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Share(_message.Message):
    __slots__ = ("tenant", "weight", "priority")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    priority: int
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

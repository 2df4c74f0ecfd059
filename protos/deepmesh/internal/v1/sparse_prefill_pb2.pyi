from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SparsePrefill(_message.Message):
    __slots__ = ("from_tokens", "recall")
    FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    from_tokens: int
    recall: float
    def __init__(self, from_tokens: _Optional[int] = ..., recall: _Optional[float] = ...) -> None: ...

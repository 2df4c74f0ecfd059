from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Constraint(_message.Message):
    __slots__ = ("grammar", "free_until", "opened_by", "may_end_free")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    FREE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    OPENED_BY_FIELD_NUMBER: _ClassVar[int]
    MAY_END_FREE_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    free_until: int
    opened_by: int
    may_end_free: bool
    def __init__(self, grammar: _Optional[str] = ..., free_until: _Optional[int] = ..., opened_by: _Optional[int] = ..., may_end_free: _Optional[bool] = ...) -> None: ...

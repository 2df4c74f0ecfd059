from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Constraint(_message.Message):
    __slots__ = ("grammar", "free_until", "opened_by", "may_end_free", "banned", "min_tokens")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    FREE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    OPENED_BY_FIELD_NUMBER: _ClassVar[int]
    MAY_END_FREE_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    free_until: int
    opened_by: int
    may_end_free: bool
    banned: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    min_tokens: int
    def __init__(self, grammar: _Optional[str] = ..., free_until: _Optional[int] = ..., opened_by: _Optional[int] = ..., may_end_free: _Optional[bool] = ..., banned: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

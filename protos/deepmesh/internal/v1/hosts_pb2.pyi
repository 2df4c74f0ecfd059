from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinWorkerRequest(_message.Message):
    __slots__ = ("join", "from_rank", "ended", "progress", "record", "stopping")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    FROM_RANK_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    join: Join
    from_rank: RankBytes
    ended: RankEnd
    progress: RanksProgress
    record: bytes
    stopping: Stopping
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., from_rank: _Optional[_Union[RankBytes, _Mapping]] = ..., ended: _Optional[_Union[RankEnd, _Mapping]] = ..., progress: _Optional[_Union[RanksProgress, _Mapping]] = ..., record: _Optional[bytes] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ...) -> None: ...

class JoinWorkerResponse(_message.Message):
    __slots__ = ("joined", "to_rank", "kill", "record")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    TO_RANK_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    to_rank: RankBytes
    kill: KillRank
    record: bytes
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., to_rank: _Optional[_Union[RankBytes, _Mapping]] = ..., kill: _Optional[_Union[KillRank, _Mapping]] = ..., record: _Optional[bytes] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("worker_id", "host", "engine", "version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    host: int
    engine: bytes
    version: str
    def __init__(self, worker_id: _Optional[str] = ..., host: _Optional[int] = ..., engine: _Optional[bytes] = ..., version: _Optional[str] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("place", "hosts")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    place: int
    hosts: int
    def __init__(self, place: _Optional[int] = ..., hosts: _Optional[int] = ...) -> None: ...

class RankBytes(_message.Message):
    __slots__ = ("rank", "data")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    data: bytes
    def __init__(self, rank: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RankEnd(_message.Message):
    __slots__ = ("rank", "status")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    status: int
    def __init__(self, rank: _Optional[int] = ..., status: _Optional[int] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RanksProgress(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankProgress]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ...) -> None: ...

class RankProgress(_message.Message):
    __slots__ = ("rank", "beats", "step_loop_passes", "transfer_passes", "longest_step_ms")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    STEP_LOOP_PASSES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PASSES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    beats: int
    step_loop_passes: int
    transfer_passes: int
    longest_step_ms: int
    def __init__(self, rank: _Optional[int] = ..., beats: _Optional[int] = ..., step_loop_passes: _Optional[int] = ..., transfer_passes: _Optional[int] = ..., longest_step_ms: _Optional[int] = ...) -> None: ...

class KillRank(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

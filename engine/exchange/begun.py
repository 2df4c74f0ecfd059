"""An exchange that is under way while its rank computes."""

from collections.abc import Callable
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class Begun(Generic[ResultT]):
    def __init__(self, collect: Callable[[], ResultT], reads: object = None) -> None:
        """collect: called once, by the first `finish`; reads: what the exchange reads, kept until then."""
        self._collect: Callable[[], ResultT] | None = collect
        self._reads = reads

    def finish(self) -> ResultT:
        """Wait for the exchange; on a GPU the current stream waits, not the host. Raises RankLost."""
        if self._collect is not None:
            self._result = self._collect()
            self._collect = self._reads = None
        return self._result

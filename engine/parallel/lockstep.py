"""Agreement of ranks over host memory: no collective of the device, and no time of it."""

from collections.abc import Callable

import msgspec

from engine.agreement import agreed
from engine.batch import StepShape
from engine.parallel.meeting import Meeting

_LENGTH_BYTES = 4


class Lockstep:
    """engine.agreement.Agreement. A proposal is a struct of its own length, so that it may get more fields."""

    def __init__(self, meeting: Meeting, wake: Callable[[], None]) -> None:
        """wake: the other ranks, which may sleep while they have nothing to compute."""
        self._meeting = meeting
        self._wake = wake
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepShape)

    @property
    def due(self) -> bool:
        return self._meeting.due

    def agree(self, proposal: StepShape) -> StepShape:
        """Raises RankLost."""
        self._write(proposal)
        self._meeting.arrive()
        # Ranks that have arrived do not sleep.
        self._meeting.wait(self._wake)
        # The order of the ranks makes no difference.
        return agreed([proposal, *(self._read(other) for other in self._meeting.others)])

    def of_first(self, shape: StepShape) -> StepShape:
        """The first rank's, on every rank. Raises RankLost."""
        self._write(shape)
        self._meeting.arrive()
        self._meeting.wait()
        first = self._meeting.members[0]
        return self._read(first) if first in self._meeting.others else shape

    def _write(self, shape: StepShape) -> None:
        encoded = self._encoder.encode(shape)
        written = len(encoded).to_bytes(_LENGTH_BYTES) + encoded
        self._meeting.slot[: len(written)] = written

    def _read(self, rank: int) -> StepShape:
        written = self._meeting.written(rank)
        length = int.from_bytes(written[:_LENGTH_BYTES])
        return self._decoder.decode(written[_LENGTH_BYTES : _LENGTH_BYTES + length])

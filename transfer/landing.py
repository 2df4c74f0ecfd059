"""The receiver's side of one transfer, as a state machine: which segments are expected, received and verified.

Pure: it moves no bytes and reads no clock. `receiver.Receiver` carries out what it decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from transfer.checksum import checksum_bytes
from transfer.ticket import Announcement, BlockMac

# Why a message was refused; keys of TransferCounters.refused.
DUPLICATE_SEGMENT = "duplicate_segment"
DUPLICATE_CHECKSUM = "duplicate_checksum"
UNKNOWN_SEGMENT = "unknown_segment"
WRONG_SIZE = "wrong_size"
WRONG_CHECKSUM = "wrong_checksum"
NOT_COPIED = "not_copied"

# Why a landing failed: `LandingFailed.reason`.
CANCELLED = "CANCELLED"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
SENDER_LOST = "SENDER_LOST"
NOT_BELIEVED = "NOT_BELIEVED"


class Phase(Enum):
    # No message of the segment has arrived.
    EXPECTED = auto()
    # Its message has arrived and waits for a slot.
    ARRIVED = auto()
    # UCX is writing it into its slot.
    RECEIVING = auto()
    # It lies in its slot, or with the sender if it is read there.
    RECEIVED = auto()
    # It was verified and copied to its blocks.
    LANDED = auto()


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    checksum_bytes: int
    phase: Phase = Phase.EXPECTED
    slot: int | None = None
    announced: Announcement | None = None


@dataclass(frozen=True)
class Failure:
    # One of the reasons above.
    reason: str
    message: str


class Landing:
    """Segments are known by index. The landing ends once: when the last segment has landed, or at the first failure."""

    def __init__(self, sizes: Sequence[int], deadline: float, with_checksums: bool = True) -> None:
        """`deadline` in seconds, on the caller's clock; with_checksums: whether segments are announced with them."""
        self._segments = [_Segment(size, checksum_bytes(size) if with_checksums else 0) for size in sizes]
        self._landed = 0
        self.deadline = deadline
        self.failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return self.failure is not None or self._landed == len(self._segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    def phase(self, index: int) -> Phase:
        return self._segments[index].phase

    def arrive(self, index: int, size_bytes: int) -> str | None:
        """A message with this segment's tag has arrived. Returns why to drop it; None to receive it."""
        segment = self._segments[index]
        if self.ended or segment.phase is not Phase.EXPECTED:
            return DUPLICATE_SEGMENT
        if size_bytes != segment.size_bytes:
            return WRONG_SIZE
        segment.phase = Phase.ARRIVED
        return None

    def receive(self, index: int, slot: int) -> None:
        """UCX writes the segment into this slot from now on."""
        segment = self._segments[index]
        assert segment.phase is Phase.ARRIVED and not self.ended
        segment.phase, segment.slot = Phase.RECEIVING, slot

    def received(self, index: int) -> None:
        """UCX has written all of the segment, and no longer uses the slot."""
        segment = self._segments[index]
        assert segment.phase is Phase.RECEIVING
        segment.phase = Phase.RECEIVED

    def announce(self, announcement: Announcement) -> str | None:
        """The sender announced a segment, before or after its bytes. Returns why the announcement is refused, or
        None.
        """
        if not 0 <= announcement.segment < len(self._segments):
            return UNKNOWN_SEGMENT
        segment = self._segments[announcement.segment]
        if segment.announced is not None:
            return DUPLICATE_CHECKSUM
        announced = announcement.size_bytes, len(announcement.checksum)
        if announced != (segment.size_bytes, segment.checksum_bytes):
            return WRONG_SIZE
        segment.announced = announcement
        return None

    def refer(self, index: int) -> None:
        """The announced segment needs no slot: its bytes are read where they lie with the sender."""
        segment = self._segments[index]
        assert segment.announced is not None
        if segment.phase is Phase.EXPECTED:
            segment.phase = Phase.RECEIVED

    def verifiable(self, index: int) -> bool:
        segment = self._segments[index]
        return not self.ended and segment.phase is Phase.RECEIVED and segment.announced is not None

    def checksum(self, index: int) -> bytes:
        """The checksum that the sender announced for a verifiable segment."""
        announced = self._segments[index].announced
        assert announced is not None
        return announced.checksum

    def sources(self, index: int) -> Sequence[int]:
        """Where a verifiable segment's blocks lie with the sender, if they are read there."""
        announced = self._segments[index].announced
        assert announced is not None
        return announced.sources

    def macs(self, index: int) -> Sequence[BlockMac | None]:
        """The MACs of a verifiable segment's blocks, as the sender announced them."""
        announced = self._segments[index].announced
        assert announced is not None
        return announced.macs

    def slot(self, index: int) -> int:
        """The slot that holds the segment."""
        slot = self._segments[index].slot
        assert slot is not None
        return slot

    def land(self, index: int) -> int | None:
        """The segment was verified and lies in its blocks. Returns its slot, if it had one, which is now free."""
        segment = self._segments[index]
        assert segment.phase is Phase.RECEIVED and not self.ended
        slot, segment.slot = segment.slot, None
        segment.phase = Phase.LANDED
        self._landed += 1
        return slot

    def fail(self, reason: str, message: str) -> None:
        """Give up the landing: segments that lie in slots are not copied any more. Only the first failure counts."""
        if not self.ended:
            self.failure = Failure(reason, message)

    def slots(self, phase: Phase) -> list[int]:
        """Slots of the segments in this phase."""
        return [each.slot for each in self._segments if each.phase is phase and each.slot is not None]

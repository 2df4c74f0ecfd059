"""What a transfer agent tells its owner: plain data, some of which travels as frames."""

import msgspec

from transfer.ticket import SegmentDigest


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """Receiver: a staging slot is free for this segment; tell the sender that it may push it."""

    transfer_id: bytes
    segment: int


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Receiver: every segment was verified and lies in its blocks. The landing is closed."""

    transfer_id: bytes
    size_bytes: int
    transport: str


class LandingFailed(msgspec.Struct, frozen=True, tag="landing_failed"):
    """Receiver: the landing is closed without all its bytes; its blocks may be released now: nothing writes to them."""

    transfer_id: bytes
    reason: str
    message: str


class SegmentSent(msgspec.Struct, frozen=True, tag="segment_sent"):
    """Sender: what was pushed; tell the receiver over the authenticated call."""

    digest: SegmentDigest


class PushEnded(msgspec.Struct, frozen=True, tag="push_ended"):
    """Sender: every segment is sent, or (error) the push was given up; its blocks may be released now."""

    transfer_id: bytes
    size_bytes: int
    transport: str
    error: str | None = None


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The answer to `fetch`: this many leading blocks of the chain are in place, possibly none. Always comes."""

    fetch_id: int
    blocks: int
    size_bytes: int
    seconds: float
    # Why there are fewer than there could be (store gone, late, refused); None where it simply has no more.
    error: str | None = None


Event = Granted | Landed | LandingFailed | SegmentSent | PushEnded | Fetched


class TransferCounters(msgspec.Struct, frozen=True):
    open_landings: int = 0
    open_pushes: int = 0
    open_fetches: int = 0
    total_slots: int = 0
    free_slots: int = 0
    quarantined_slots: int = 0
    # By UCX transport, e.g. {"tcp": 1024}.
    received_bytes: dict[str, int] = {}
    sent_bytes: dict[str, int] = {}
    # Bad MAC, unknown or replayed ticket, wrong size, wrong digest...: by reason.
    refused: dict[str, int] = {}
    fetches: int = 0
    fetched_blocks: int = 0
    # Smoothed, of fetches that brought blocks; 0 while unknown.
    fetch_bytes_per_second: float = 0.0

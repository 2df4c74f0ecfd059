"""What a transfer agent tells its owner: plain data, some of which travels as frames."""

import msgspec


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


class PushEnded(msgspec.Struct, frozen=True, tag="push_ended"):
    """Sender: every segment is sent, or (error) the push was given up; its blocks may be released now."""

    transfer_id: bytes
    size_bytes: int
    transport: str
    error: str | None = None
    # From when all of it was computed until all of it was sent; None where some was sent before, or it was given up.
    seconds: float | None = None


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The answer to `fetch`: this many leading blocks of the chain are in place, possibly none. Always comes."""

    fetch_id: int
    blocks: int
    size_bytes: int
    seconds: float
    # Why there are fewer than there could be (store gone, late, refused); None where it simply has no more.
    error: str | None = None


Event = Landed | LandingFailed | PushEnded | Fetched

"""What a transfer agent reports to its owner: plain data, some of which travels in frames."""

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
    """Sender: every segment was sent, or (error) the push was given up. Its blocks may be released now."""

    transfer_id: bytes
    size_bytes: int
    transport: str
    error: str | None = None
    # From all of it being computed to all of it being sent; None if some was sent before, or if it was given up.
    seconds: float | None = None


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The end of a fetch: so many leading blocks of the chain are in place, possibly none."""

    fetch_id: int
    blocks: int
    size_bytes: int
    seconds: float
    # Why there may be fewer than the store has (it is gone, late, or refused); None if it has no more.
    error: str | None = None
    # How many leading blocks of them came with their draft layers too.
    drafted: int = 0
    # Until the store had said how many it has; None if it never did.
    answered_seconds: float | None = None


Event = Landed | LandingFailed | PushEnded | Fetched

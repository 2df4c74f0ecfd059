"""A transfer agent's reports to its owner: plain data, some of which travels in frames."""

import msgspec


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Receiver: every segment was verified and lies in its blocks. The landing is closed."""

    transfer_id: bytes
    size_bytes: int
    transport: str


class LandingFailed(msgspec.Struct, frozen=True, tag="landing_failed"):
    """Receiver: the landing is closed but incomplete. Nothing writes to its blocks any more, so they may be
    released.
    """

    transfer_id: bytes
    reason: str
    message: str


class PushEnded(msgspec.Struct, frozen=True, tag="push_ended"):
    """Sender: every segment was sent, or the push was given up (`error`). Its blocks may be released."""

    transfer_id: bytes
    size_bytes: int
    transport: str
    error: str | None = None
    # Seconds from the end of the computation until all was sent; None if some was sent earlier, or if the push was
    # given up.
    seconds: float | None = None


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The end of a fetch: `blocks` leading blocks of the chain are in place, possibly none."""

    fetch_id: int
    blocks: int
    size_bytes: int
    seconds: float
    # Why `blocks` may be fewer than the store has (it is gone, late, or refused); None if it has no more.
    error: str | None = None
    # How many of the blocks, counted from the first, came with their draft layers.
    drafted: int = 0
    # Seconds until the store had said how many blocks it has; None if it never did.
    answered_seconds: float | None = None


Event = Landed | LandingFailed | PushEnded | Fetched

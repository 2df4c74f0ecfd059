"""A transfer from this process: what the exchange and a store's lookups hand to the sender."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transfer.block_macs import MacSource
from transfer.push import PushState
from transfer.segments import Tile


@dataclass(eq=False)
class Outgoing:
    """Its state, what goes where, and whom to tell of its end."""

    push: PushState
    tiles: Sequence[Tile]
    # Worker address of each segment.
    addresses: Sequence[bytes]
    # The landing's tag and secret: see `ticket.Ticket`.
    tag: int
    secret: bytes
    blocks: Sequence[int]
    # The sender calls it once; from then on nothing reads the blocks.
    ended: Callable[["Outgoing"], None]
    # Where the MACs of its blocks come from; None between workers.
    macs: MacSource | None = None
    # When all of it was computed while nothing was sent, on the caller's clock; None if that never was.
    ready_at: float | None = None
    # The sender writes these.
    sent_bytes: int = 0
    transport: str = "unknown"

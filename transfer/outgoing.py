"""A transfer from this process: what the exchange and a store's lookups pass to the sender."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transfer.block_macs import MacSource
from transfer.push import PushState
from transfer.segments import Tile


@dataclass(eq=False)
class Outgoing:
    """The transfer's state, what goes where, and whom to tell of its end."""

    push: PushState
    tiles: Sequence[Tile]
    # The worker address for each segment.
    addresses: Sequence[bytes]
    # The landing's tag and secret: see `ticket.Ticket`.
    tag: int
    secret: bytes
    blocks: Sequence[int]
    # Called once by the sender; from then on nothing reads the blocks.
    ended: Callable[["Outgoing"], None]
    # Supplies the MACs of its blocks; None between workers.
    macs: MacSource | None = None
    # Whether it goes to a store. Its UCX may know no GPU, and then takes nothing that lies on one.
    to_store: bool = False
    # When all of it was computed and nothing had been sent yet, on the caller's clock; None if there was no such time.
    ready_at: float | None = None
    # Written by the sender.
    sent_bytes: int = 0
    transport: str = "unknown"

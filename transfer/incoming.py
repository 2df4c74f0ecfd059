"""A transfer to this process: what the exchange and a worker's fetches pass to the receiver."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transfer.block_macs import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, MacSink
from transfer.landing import Landing
from transfer.segments import Tile
from transfer.tags import landing_tags

# The checksum of the largest segment, 64 MiB, needs half of this.
_CHECKSUM_MESSAGE_BYTES = 16 << 10
# Size of a BlockMac without its tags, as MessagePack: a worker's id has at most 256 characters of 4 bytes.
_MAC_BYTES = 1024 + SALT_BYTES + KEY_ID_BYTES + 32


@dataclass(eq=False)
class Incoming:
    """The transfer's state, where its segments go, and whom to tell of its end."""

    landing: Landing
    tiles: Sequence[Tile]
    # See `ticket.Ticket`.
    tag: int
    secret: bytes
    blocks: Sequence[int]
    # Called once by the receiver; from then on nothing writes to the blocks.
    ended: Callable[["Incoming"], None]
    # Handles the MACs of its blocks; None between workers.
    macs: MacSink | None = None
    # UCX transports that the sender named; written by the receiver.
    transports: set[str] = field(default_factory=set)

    @property
    def transport(self) -> str:
        return "+".join(sorted(self.transports)) or "unknown"

    @property
    def max_announcement_bytes(self) -> int:
        """Largest announcement of a segment that is accepted."""
        if self.macs is None:
            return _CHECKSUM_MESSAGE_BYTES
        largest = max((tile.pieces * TAG_BYTES + tile.block_count * _MAC_BYTES for tile in self.tiles), default=0)
        return _CHECKSUM_MESSAGE_BYTES + largest

    @property
    def tags(self) -> range:
        """The tag of its checksums, followed by those of its segments."""
        return range(self.tag, self.tag + landing_tags(len(self.tiles)))

"""A transfer to this process: what the exchange and a worker's fetches pass to the receiver."""

from collections.abc import Callable, Sequence

from transfer.block_macs import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, MacSink
from transfer.landing import Landing
from transfer.segments import Tile
from transfer.tags import landing_tags

# The checksum of the largest segment, 64 MiB, needs half of this.
_CHECKSUM_MESSAGE_BYTES = 16 << 10
# Size of a BlockMac without its tags, as MessagePack: a worker's id has at most 256 characters of 4 bytes.
_MAC_BYTES = 1024 + SALT_BYTES + KEY_ID_BYTES + 32


class Incoming(Landing):
    """A landing, where its segments go, and whom to tell of its end."""

    def __init__(
        self,
        sizes: Sequence[int],
        deadline: float,
        tiles: Sequence[Tile],
        tag: int,
        secret: bytes,
        blocks: Sequence[int],
        on_end: Callable[["Incoming"], None],
        mac_sink: MacSink | None = None,
    ) -> None:
        """sizes, deadline: see `Landing`; tag, secret: see `ticket.Ticket`.

        on_end: called once by the receiver; from then on nothing writes to the blocks. mac_sink: handles the MACs of
        its blocks; None between workers.
        """
        super().__init__(sizes, deadline)
        self.tiles = tiles
        self.tag = tag
        self.secret = secret
        self.blocks = blocks
        self.on_end = on_end
        self.mac_sink = mac_sink
        # UCX transports that the sender named; written by the receiver.
        self.transports: set[str] = set()

    @property
    def transport(self) -> str:
        return "+".join(sorted(self.transports)) or "unknown"

    @property
    def max_announcement_bytes(self) -> int:
        """Largest announcement of a segment that is accepted."""
        if self.mac_sink is None:
            return _CHECKSUM_MESSAGE_BYTES
        largest = max((tile.pieces * TAG_BYTES + tile.block_count * _MAC_BYTES for tile in self.tiles), default=0)
        return _CHECKSUM_MESSAGE_BYTES + largest

    @property
    def tags(self) -> range:
        """The tag of its checksums, followed by those of its segments."""
        return range(self.tag, self.tag + landing_tags(len(self.tiles)))

"""A transfer to this process: what the exchange and a worker's fetches pass to the receiver."""

from collections.abc import Callable, Sequence
from typing import Protocol

from transfer.block_macs import KEY_ID_BYTES, SALT_BYTES, MacSink
from transfer.gmac import TAG_BYTES
from transfer.landing import Landing
from transfer.memory import Pending
from transfer.segments import Tile
from transfer.tags import landing_tags

# The checksum of the largest segment, 64 MiB, needs half of this.
_CHECKSUM_MESSAGE_BYTES = 16 << 10
# Size of a BlockMac without its tags, as MessagePack: a worker's id has at most 256 characters of 4 bytes.
_MAC_BYTES = 1024 + SALT_BYTES + KEY_ID_BYTES + 32
# The longest number in MessagePack.
_NUMBER_BYTES = 9


class Source(Protocol):
    """Where an announced segment is read without a slot, if its sender does not send it."""

    def take(self, incoming: "Incoming", index: int) -> Pending[str | None]:
        """Begin to copy the segment to its blocks. The result is None if that succeeded, or why it must not be used;
        its blocks then hold anything.
        """
        ...


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
        source: Source | None = None,
        from_store: bool = False,
    ) -> None:
        """sizes, deadline: see `Landing`; tag, secret: see `ticket.Ticket`.

        on_end: called once by the receiver; from then on nothing writes to the blocks. mac_sink: handles the MACs of
        its blocks; None between workers. source: where its segments are read, if they are not sent. from_store: its
        UCX may know no GPU, and then sends nothing to one.
        """
        super().__init__(sizes, deadline, with_checksums=source is None)
        self.source = source
        self.tiles = tiles
        self.tag = tag
        self.secret = secret
        self.blocks = blocks
        self.on_end = on_end
        self.mac_sink = mac_sink
        self.from_store = from_store
        # UCX transports that the sender named; written by the receiver.
        self.transports: set[str] = set()

    @property
    def transport(self) -> str:
        return "+".join(sorted(self.transports)) or "unknown"

    @property
    def is_sent(self) -> bool:
        """Whether its sender sends the segments, and does not only announce them."""
        return self.source is None

    @property
    def max_announcement_bytes(self) -> int:
        """Largest announcement of a segment that is accepted."""
        return _CHECKSUM_MESSAGE_BYTES + max(map(self._described_bytes, self.tiles), default=0)

    def _described_bytes(self, tile: Tile) -> int:
        """Room for what an announcement says of a tile's pieces and blocks, in addition to a segment's checksum."""
        size = 0 if self.is_sent else tile.block_count * _NUMBER_BYTES
        return size if self.mac_sink is None else size + tile.pieces * TAG_BYTES + tile.block_count * _MAC_BYTES

    @property
    def tags(self) -> range:
        """The tag of its checksums, followed by those of its segments."""
        return range(self.tag, self.tag + landing_tags(len(self.tiles)))

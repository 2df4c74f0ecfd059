"""A transfer to this process: what the exchange and a worker's fetches hand to the receiver."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transfer.landing import Landing
from transfer.segments import Tile
from transfer.tags import landing_tags


@dataclass(eq=False)
class Incoming:
    """Its state, where its segments go, and whom to tell of its end."""

    landing: Landing
    tiles: Sequence[Tile]
    # See `ticket.Ticket`.
    tag: int
    secret: bytes
    blocks: Sequence[int]
    # The receiver calls it once; from then on nothing writes to the blocks.
    ended: Callable[["Incoming"], None]
    # UCX transports that the sender named. The receiver writes it.
    transports: set[str] = field(default_factory=set)

    @property
    def transport(self) -> str:
        return "+".join(sorted(self.transports)) or "unknown"

    @property
    def tags(self) -> range:
        """The tag of its digests, and those of its segments."""
        return range(self.tag, self.tag + landing_tags(len(self.tiles)))

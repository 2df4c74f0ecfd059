"""A rank's KV in host memory: blocks that the pool evicts are kept there, and read back for requests."""

from collections.abc import Sequence

from engine.blocks.host_blocks import Evicted, HostBlocks
from engine.moves.host_slots import HostSlots
from engine.pace.smoothing import SmoothedRatio
from mesh.domain.workers import HostTierStatus
from mesh.observe import span
from transfer.memory import Pending

# Weight of the past against one more read.
READ_DECAY = 0.9


class HostTier:
    """Directory and bytes of the lower tier, and how much was copied.

    Attributes:
        blocks: which content has which slot.
    """

    def __init__(self, slots: HostSlots, block_bytes: int) -> None:
        """block_bytes: of one block, with all layers."""
        self.blocks = HostBlocks(slots.count)
        self._slots = slots
        self._block_bytes = block_bytes
        self._written = self._read = 0
        self._bytes_per_second = SmoothedRatio()

    @property
    def status(self) -> HostTierStatus:
        return HostTierStatus(
            self.blocks.total, len(self.blocks), self._written, self._read, self._bytes_per_second.value
        )

    def keep(self, evicted: Sequence[Evicted]) -> None:
        """Copy these blocks to host memory, unless they are there already. After that their places in the pool are
        free.
        """
        # A block may get the slot of one that was added just before it: the later copy stays.
        places = [(each.block, slot) for each in evicted if (slot := self.blocks.add(each)) is not None]
        if places:
            with span("engine.keep_on_host", blocks=len(places)):
                self._slots.write([block for block, _ in places], [slot for _, slot in places]).result()
            self._written += len(places)

    def begin_read(self, contents: Sequence[bytes], blocks: Sequence[int]) -> Pending[float]:
        """Copy these contents, which are pinned until `end_read`, to blocks of the pool. The result is in seconds."""
        return self._slots.read(self.blocks.slots(contents), blocks)

    def end_read(self, contents: Sequence[bytes], seconds: float) -> None:
        self.blocks.unpin(contents)
        self._read += len(contents)
        self._bytes_per_second.observe(len(contents) * self._block_bytes, seconds, READ_DECAY)

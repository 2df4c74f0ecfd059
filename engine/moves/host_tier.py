"""A rank's KV in host memory: blocks that the pool evicts are kept there, and read back for requests."""

from collections.abc import Sequence

from engine.blocks.host_blocks import Evicted, HostBlocks
from engine.blocks.kv_pool import BlockPool
from engine.moves.host_slots import HostSlots
from engine.pace.smoothing import SmoothedRatio
from mesh.domain.workers import HostTierStatus
from mesh.observe.spans import span
from transfer.memory import Pending

# Weight of the past against one more read.
READ_DECAY = 0.9
# Where copies take a while, this many blocks are copied before they are evicted: about as many as prompts that are
# admitted together take.
AHEAD_BLOCKS = 256


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
        # Blocks of the pool that are being copied.
        self._copying: dict[int, Pending[None]] = {}
        self._bytes_per_second = SmoothedRatio()

    @property
    def status(self) -> HostTierStatus:
        return HostTierStatus(
            self._slots.count, len(self.blocks), self._written, self._read, self._bytes_per_second.value
        )

    def keep(self, evicted: Sequence[Evicted]) -> None:
        """Copy these blocks to host memory, unless they are there already, and wait for their copies: afterwards their
        places in the pool are free.
        """
        self._write(evicted)
        with span("engine.keep_on_host", blocks=len(evicted)):
            for each in evicted:
                if (copy := self._copying.pop(each.block, None)) is not None:
                    copy.result()

    def write_ahead(self, pool: BlockPool) -> None:
        """Begin to copy what the pool will evict next, so that `keep` need not wait for it. To be called while the
        device computes.
        """
        if not self._slots.completes_later or pool.blank_blocks >= AHEAD_BLOCKS:
            return
        self._copying = {block: copy for block, copy in self._copying.items() if not copy.completed}
        # One such copy at a time leaves the link to reads.
        if not self._copying:
            self._write(pool.next_evicted(AHEAD_BLOCKS))

    def _write(self, blocks: Sequence[Evicted]) -> None:
        """Begin to copy those of the blocks that are not in host memory yet."""
        self.blocks.total = self._slots.count
        # A block may get the slot of one that was added just before it: the later copy stays.
        places = [(each.block, slot) for each in blocks if (slot := self.blocks.add(each)) is not None]
        if places:
            copied, slots = [block for block, _ in places], [slot for _, slot in places]
            self._copying.update(dict.fromkeys(copied, self._slots.write(copied, slots)))
            self._written += len(places)

    def begin_read(self, contents: Sequence[bytes], blocks: Sequence[int]) -> Pending[float]:
        """Copy these contents, which are pinned until `end_read`, to blocks of the pool. The result is in seconds."""
        return self._slots.read(self.blocks.slots(contents), blocks)

    def end_read(self, contents: Sequence[bytes], seconds: float) -> None:
        self.blocks.unpin(contents)
        self._read += len(contents)
        self._bytes_per_second.observe(len(contents) * self._block_bytes, seconds, READ_DECAY)

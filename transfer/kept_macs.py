"""MACs of the blocks of a store, as their writers sent them. A store can neither make nor check them."""

from collections.abc import Sequence
from dataclasses import dataclass

from transfer.block_macs import WRONG_BLOCK_MAC, Tags
from transfer.gmac import TAG_BYTES
from transfer.memory import Check
from transfer.segments import Tile
from transfer.ticket import BlockMac


class KeptMacs:
    """MACs by block of the store's memory. The transfer thread writes those of landings; other threads may read and
    move those of stored blocks, as they may their bytes.
    """

    def __init__(self, layers: int, blocks: int) -> None:
        self._tag_bytes = layers * TAG_BYTES
        self._macs: list[BlockMac | None] = [None] * blocks

    def __getitem__(self, block: int) -> BlockMac | None:
        """The MAC over all layers; None if the block came without one."""
        return self._macs[block]

    def __setitem__(self, block: int, mac: BlockMac | None) -> None:
        self._macs[block] = mac

    def keep(self, block: int, first_layer: int, layer_count: int, mac: BlockMac | None) -> None:
        """Keep the MAC of one part of a block. If it does not belong together with the part kept so far, that part is
        dropped.
        """
        kept = self._macs[block]
        if mac is None or len(mac.tags) != layer_count * TAG_BYTES:
            self._macs[block] = None
            return
        same = kept is not None and (kept.writer, kept.salt, kept.key_id) == (mac.writer, mac.salt, mac.key_id)
        tags = bytearray(kept.tags if kept is not None and same else bytes(self._tag_bytes))
        tags[first_layer * TAG_BYTES : (first_layer + layer_count) * TAG_BYTES] = mac.tags
        self._macs[block] = BlockMac(mac.writer, mac.salt, bytes(tags), mac.key_id)

    def part(self, block: int, first_layer: int, layer_count: int) -> BlockMac | None:
        kept = self._macs[block]
        if kept is None:
            return None
        tags = kept.tags[first_layer * TAG_BYTES : (first_layer + layer_count) * TAG_BYTES]
        return BlockMac(kept.writer, kept.salt, tags, kept.key_id)


@dataclass(frozen=True)
class Keeping:
    """The MACs of an offer that lands in a store's blocks, or of a fetch from them."""

    kept: KeptMacs
    blocks: Sequence[int]

    def check(self, tile: Tile, macs: Sequence[BlockMac | None]) -> Check | str:
        for block, mac in zip(self._blocks_of(tile), macs or [None] * tile.block_count, strict=False):
            self.kept.keep(block, tile.first_layer, tile.layer_count, mac)
        return Check((), lambda tags: None) if len(macs) in (0, tile.block_count) else WRONG_BLOCK_MAC

    def macs_of(self, tile: Tile, tags: Tags) -> tuple[BlockMac | None, ...]:
        return tuple(self.kept.part(block, tile.first_layer, tile.layer_count) for block in self._blocks_of(tile))

    def _blocks_of(self, tile: Tile) -> Sequence[int]:
        return self.blocks[tile.first_block : tile.first_block + tile.block_count]

"""How a transfer is cut into segments: pure arithmetic over layers and blocks."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from mesh.errors import ConfigError
from transfer.ticket import Segment

# A layerwise segment spans the layers of at most one of this many groups, so that most of a prompt's KV is sent while
# later layers are still computed.
LAYER_GROUPS = 8
# A worker's segments in host memory are no larger: they then lie in the processor's caches between two copies. On a GPU
# a segment costs the host the same, however large it is. A store takes what suits its workers.
HOST_SEGMENT_BYTES = 8 << 20


class Tile(NamedTuple):
    """`layer_count` layers of `block_count` blocks; blocks are counted within the transfer."""

    first_layer: int
    layer_count: int
    first_block: int
    block_count: int

    @property
    def pieces(self) -> int:
        return self.layer_count * self.block_count


def plan_whole(layers: int, blocks: int, piece_bytes: int, segment_bytes: int) -> list[Tile]:
    """Runs of blocks with all their layers. Layers are split only if one block alone is too large."""
    return _tiles(layers, blocks, layers, piece_bytes, segment_bytes, _short_ended_runs)


class Parts(NamedTuple):
    """The layers of a block: those of the model, followed by those of drafts, which not every block has."""

    base_layers: int
    draft_layers: int


def plan_parts(parts: Parts, blocks: int, drafted: int, piece_bytes: int, segment_bytes: int) -> list[Tile]:
    """As `plan_whole`, with all layers of the first `drafted` blocks, and only the base layers of the others."""
    if not parts.draft_layers or not drafted:
        return plan_whole(parts.base_layers, blocks, piece_bytes, segment_bytes)
    whole = plan_whole(sum(parts), drafted, piece_bytes, segment_bytes)
    others = plan_whole(parts.base_layers, blocks - drafted, piece_bytes, segment_bytes)
    return whole + [tile._replace(first_block=tile.first_block + drafted) for tile in others]


def plan_layerwise(layers: int, blocks: int, piece_bytes: int, segment_bytes: int) -> list[Tile]:
    """Runs of blocks by groups of layers: each can be sent as soon as its layers are computed."""
    return _tiles(layers, blocks, -(-layers // LAYER_GROUPS), piece_bytes, segment_bytes, _even_runs)


def tile_of(segment: Segment) -> Tile:
    return Tile(segment.first_layer, segment.layer_count, segment.first_block, segment.block_count)


def covers_once(tiles: Sequence[Tile], layers: int, blocks: int) -> bool:
    """Whether the tiles cover every layer of every block exactly once."""
    seen: set[tuple[int, int]] = set()
    pieces = 0
    for tile in tiles:
        if tile.first_layer + tile.layer_count > layers or tile.first_block + tile.block_count > blocks:
            return False
        pieces += tile.pieces
        if pieces > layers * blocks:
            return False
        seen.update(_pieces(tile))
    return len(seen) == layers * blocks == pieces


def _pieces(tile: Tile) -> Iterator[tuple[int, int]]:
    for layer in range(tile.first_layer, tile.first_layer + tile.layer_count):
        for block in range(tile.first_block, tile.first_block + tile.block_count):
            yield layer, block


def _tiles(
    layers: int,
    blocks: int,
    layer_group: int,
    piece_bytes: int,
    segment_bytes: int,
    cut: Callable[[int, int], list[int]],
) -> list[Tile]:
    """Tiles of at most `segment_bytes` each, ordered by blocks, then by layers."""
    if piece_bytes > segment_bytes:
        raise ConfigError(
            f"transfer.slot_bytes must hold one block of one layer: it is {segment_bytes}, a block has {piece_bytes}"
        )
    layer_group = min(layer_group, segment_bytes // piece_bytes)
    runs = cut(blocks, segment_bytes // (layer_group * piece_bytes))
    return [
        Tile(first_layer, min(layer_group, layers - first_layer), first_block, count)
        for first_block, count in zip(accumulate(runs, initial=0), runs, strict=False)
        for first_layer in range(0, layers, layer_group)
    ]


def _short_ended_runs(count: int, longest: int) -> list[int]:
    """Even runs. If there are many, the first is short, to start sending early, and the last, to finish verifying
    early.
    """
    first, last = longest // 2, longest // 4
    if not last or count <= 2 * longest:
        return _even_runs(count, longest)
    return [first, *_even_runs(count - first - last, longest), last]


def _even_runs(count: int, longest: int) -> list[int]:
    """`count` items in as few runs as possible. The lengths differ by at most one, longer runs first."""
    runs = -(-count // longest)
    return [-(-(count - number) // runs) for number in range(runs)]

"""The sender's side of one transfer, as a state machine: what is computed, what may be sent, what is in flight.

Pure: it moves no bytes and reads no clock. `sender.Sender` carries out what it decides.
"""

from collections.abc import Sequence

from transfer.segments import Tile


class PushState:
    """Segments may be sent as they are computed: only the sender knows the order of its prompt's chunks and layers."""

    def __init__(self, tiles: Sequence[Tile], deadline: float) -> None:
        """`deadline` in seconds, on the caller's clock."""
        self._tiles = tiles
        self._layers = max((tile.first_layer + tile.layer_count for tile in tiles), default=0)
        self._blocks = max((tile.first_block + tile.block_count for tile in tiles), default=0)
        self._unsent = list(range(len(tiles)))
        # The computed region, as the corners (layers, blocks) of a staircase. No corner lies within another's
        # rectangle.
        self._computed: list[tuple[int, int]] = []
        self._begun = False
        self._in_flight: set[int] = set()
        self.deadline = deadline
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        return self.error is not None or (not self._unsent and not self._in_flight)

    @property
    def in_flight(self) -> list[int]:
        """The segments that are being gathered or sent."""
        return sorted(self._in_flight)

    @property
    def is_ready_unsent(self) -> bool:
        """Whether all of it is computed and nothing was sent yet."""
        whole = any(layers >= self._layers and blocks >= self._blocks for layers, blocks in self._computed)
        return whole and not self._begun

    def computed(self, layers: int, blocks: int) -> None:
        """The first `layers` layers of the first `blocks` blocks are computed."""
        if any(layers <= have_layers and blocks <= have_blocks for have_layers, have_blocks in self._computed):
            return
        self._computed = [
            (have_layers, have_blocks)
            for have_layers, have_blocks in self._computed
            if have_layers > layers or have_blocks > blocks
        ]
        self._computed.append((layers, blocks))

    def next_segment(self) -> int | None:
        """The first segment that may be sent now."""
        if self.ended:
            return None
        return next((index for index in self._unsent if self._is_computed(self._tiles[index])), None)

    def begin(self, index: int) -> None:
        """The segment is being gathered and sent from now on."""
        assert not self.ended
        self._unsent.remove(index)
        self._begun = True
        self._in_flight.add(index)

    def sent(self, index: int) -> None:
        """UCX no longer needs the segment's slot."""
        self._in_flight.remove(index)

    def fail(self, error: str) -> None:
        """Give up the push. Only the first error counts."""
        if not self.ended:
            self.error = error

    def _is_computed(self, tile: Tile) -> bool:
        layers, blocks = tile.first_layer + tile.layer_count, tile.first_block + tile.block_count
        return any(layers <= have_layers and blocks <= have_blocks for have_layers, have_blocks in self._computed)

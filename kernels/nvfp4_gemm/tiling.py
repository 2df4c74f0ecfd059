"""How the product on Hopper is tiled."""

from dataclasses import dataclass

from kernels.nvfp4_gemm.packing import TILE_INPUTS, TILE_OUTPUTS


@dataclass(frozen=True, slots=True)
class Tiling:
    """`Shape` in the CUDA source."""

    # Rows of a tile.
    rows: int
    # How many warpgroups multiply, each `parts` times 64 outputs; one more copies.
    warpgroups: int
    parts: int
    # How many warpgroups share the inputs of the same outputs.
    split: int

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return self.warpgroups // self.split * self.parts * TILE_OUTPUTS


# By the most rows that an expert may expect, so that a tile holds all rows of most experts.
WIDE = {
    11: Tiling(16, 4, 1, 1),
    24: Tiling(32, 4, 1, 1),
    38: Tiling(48, 4, 1, 1),
    53: Tiling(64, 4, 1, 1),
    82: Tiling(96, 2, 2, 1),
    128: Tiling(128, 2, 2, 1),
}
# Tilings with fewer outputs, for products that would have too few tiles.
NARROW = (Tiling(16, 4, 1, 4), Tiling(32, 4, 1, 4), Tiling(64, 4, 1, 2))
# Tilings with more outputs: these read an expert's rows fewer times.
DOUBLE = (Tiling(16, 4, 2, 1), Tiling(32, 4, 2, 1), Tiling(48, 4, 2, 1))
TILINGS = (*WIDE.values(), *NARROW, *DOUBLE)
# Measured on an H200: a tile takes time in proportion to its outputs times the sum of its rows and this number, for
# which its weights are read and decoded. Narrow and double tiles take longer by these factors.
MORE_ROWS, FACTORS = 96, dict.fromkeys(NARROW, 1.2) | dict.fromkeys(DOUBLE, 0.92)


def choose_tiling(rows: int, experts: int, outputs: int, inputs: int, processors: int) -> Tiling:
    """The fastest tiling. rows: of all experts; processors: multiprocessors, each of which makes a tile at a time."""
    expected = -(-rows // experts)
    if experts > 1:
        expected = max(expected, next((tiling.rows for most, tiling in WIDE.items() if expected <= most), expected))

    def cost(tiling: Tiling) -> float:
        tiles = min(experts * -(-expected // tiling.rows), rows) * -(-outputs // tiling.outputs)
        rounds = -(-tiles // processors)
        return rounds * tiling.outputs * (tiling.rows + MORE_ROWS) * FACTORS.get(tiling, 1)

    return min((each for each in TILINGS if inputs // TILE_INPUTS % each.split == 0), key=cost)

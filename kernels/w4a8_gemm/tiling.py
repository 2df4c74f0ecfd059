"""How the product on Hopper is cut, by the rows that an expert expects."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """`Shape` in the CUDA source."""

    # Rows of a tile; they are copied by boxes.
    rows: int
    # Each of them multiplies `parts` times 64 outputs; one more copies.
    warpgroups: int
    parts: int

    @property
    def box_rows(self) -> int:
        return min(self.rows, 64)


# The last one is for any number of rows: a tile of it that has 32, 64 or 96 rows or fewer is made as of so many.
TILINGS = (
    Tiling(16, 4, 1),
    Tiling(24, 4, 1),
    Tiling(32, 4, 1),
    Tiling(128, 2, 2),
)


@dataclass(frozen=True, slots=True)
class TilingTable:
    # The most expected rows for which a tiling of `TILINGS` is taken, ascending; more rows take the last tiling.
    most_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.most_rows) == len(TILINGS) - 1 and list(self.most_rows) == sorted(self.most_rows)

    def choose(self, expected_rows: int, capacity: int) -> Tiling:
        """capacity: the most rows that an expert can have; a larger tile would hold nothing more."""
        for most, tiling in zip(self.most_rows, TILINGS, strict=False):
            if expected_rows <= most or tiling.rows >= capacity:
                return tiling
        return TILINGS[-1]


# Measured on an H200, even loads and ones by Zipf's law together: the last tile reads an expert's weights
# fewer times if it has many rows, and is made as of few rows if it has few.
H200 = TilingTable((7, 12, 20))

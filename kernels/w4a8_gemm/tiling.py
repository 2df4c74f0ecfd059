"""How the product on Hopper is tiled, by the rows that an expert expects and by how many experts have any."""

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class Tiling:
    """`Shape` in the CUDA source."""

    # Rows of a tile; they are copied by boxes.
    rows: int
    # How many warpgroups multiply, each `parts` times 64 outputs over every `turns`-th group of inputs; one more
    # copies.
    warpgroups: int
    parts: int
    turns: int = 1

    @property
    def outputs(self) -> int:
        return 64 * self.warpgroups * self.parts // self.turns

    @property
    def box_rows(self) -> int:
        return min(self.rows, 64)


# The last one is for any number of rows. A tile is computed as one of as many eights of rows as it has.
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


# Measured on an H200, with even loads and loads by Zipf's law together. The last tiling reads an expert's weights fewer
# times if the expert has many rows, and is computed as a smaller one if it has few.
H200 = TilingTable((7, 12, 20))

# For few rows of few experts, for which most CTAs would have no tile otherwise. A warpgroup needs some 0.3 us for a
# group whatever the others do, so that it takes four of them to decode 50 GB/s.
NARROW = Tiling(16, 4, 1, 2)
# Narrow tiles are taken up to this many of both products. Measured: 440 and 512 are faster than half as many wide ones,
# by 3.4 and 2.7 us of 39 and 29; 528 and 1024 are slower by 2.1 and 1.5.
MOST_NARROW_TILES = 512


def narrowed(tiling: Tiling, gate_up: tuple[int, int], copies: float, *, divided: bool) -> Tiling:
    """`tiling`, or the narrow one if that is faster. copies: how many copies of tokens go to experts that lie here, on
    average.

    gate_up: outputs and inputs of an expert's first product. divided: whether other ranks have experts too. Then a rank
    whose experts are chosen more often than on average holds all of them up.
    """
    outputs, inputs = gate_up
    touched = copies + 2 * sqrt(copies) if divided else copies
    # Groups of 128 inputs of the first product, and of the last one.
    whole_turns = inputs // 128 % NARROW.turns == 0 and outputs // 256 % NARROW.turns == 0
    # This few rows fit into one tile even if they all have the same expert.
    narrow = touched <= NARROW.rows and touched * (outputs + inputs) <= MOST_NARROW_TILES * NARROW.outputs
    return NARROW if narrow and whole_turns else tiling


# Multiprocessors that a step's product leaves to shared experts meanwhile, whose CTAs fill one each: 4, 8 if all held
# experts take less time than shared ones on 4, or 36 with few copies. All 16 or 22 CTAs of gate and up and all but two
# of down's 38 then run at once, while the other 96 decode 4.8 TB/s, more than memory delivers.
SPARE, SPARE_OF_SOME, SPARE_OF_FEW = 4, 8, 36
# There are few copies if that many experts have at most this many bytes: 32 of R1's, which take 170 us to read. Shared
# experts that four ranks divide take 150 us on 4 multiprocessors: with more copies they end first anyway.
FEW_BYTES = 750_000_000
# R1's shared experts take some 270 us on 4 multiprocessors and 150 on 8: six rounds of gate and up and ten of down, or
# three and five. Experts of this many bytes take 240.
SOME_BYTES = 1_000_000_000


def spared(copies: float, expert_bytes: int, experts: int) -> int:
    """How many multiprocessors are left to shared experts. Results do not depend on it.

    copies: as in `narrowed`; experts: how many are held.
    """
    if copies * expert_bytes <= FEW_BYTES:
        return SPARE_OF_FEW
    return SPARE_OF_SOME if experts * expert_bytes <= SOME_BYTES else SPARE


# The most bytes of chosen experts for which the kernel of few tokens is taken: those of two tokens on one of four ranks
# that divide the width of R1's experts, and of one on one of two. Measured: 8 and 16 of 256 experts 512 wide take 18.4
# and 30.8 us instead of 29.9 and 40.0. Whole experts lost to tiles.
MOST_FEW_BYTES = 100_000_000

"""How many tokens a step computes on a GPU: it is padded to one of a few sizes.

Kernels are chosen, planned and in part compiled by the number of tokens. With few sizes a worker can run all of them
before it serves.
"""

from bisect import bisect_left
from collections.abc import Sequence

# All sizes are multiples of it, and so is the alignment of what follows from a size.
SMALLEST = 16
# How many sizes lie between powers of two: from 128 tokens on the padding is less than an eighth.
OCTAVE_SIZES = 8
# The same for captured sizes up to FEW_TOKENS, whose padding is less than a quarter. Each captured size takes time at
# the start, and padding costs little where a layer's weights take the device more time than its tokens do.
CAPTURED_OCTAVE_SIZES = 4
FEW_TOKENS = 512


def step_sizes(most: int, captured: int = 0) -> list[int]:
    """Ascending sizes; the last is `most`, the size of full steps. captured: sizes up to this many are captured."""
    sizes, size = [], SMALLEST
    while size < most:
        sizes.append(size)
        between = CAPTURED_OCTAVE_SIZES if size < min(captured, FEW_TOKENS) else OCTAVE_SIZES
        size += max((1 << size.bit_length() - 1) // between, SMALLEST)
    return [*sizes, most]


def padded_size(tokens: int, sizes: Sequence[int]) -> int:
    """The first of ascending `sizes` that holds this many tokens; the number itself if none does.

    A draft layer may compute more tokens than a step has, one of each new prompt.
    """
    place = bisect_left(sizes, tokens)
    return sizes[place] if place < len(sizes) else tokens

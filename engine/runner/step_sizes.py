"""How many tokens a step computes on a GPU: one of few numbers, to which it is padded.

Kernels are chosen, planned and in part compiled by the number of tokens, so that each number is another step. Of these
all can be run before a worker serves.
"""

from bisect import bisect_left
from collections.abc import Sequence

# Sizes are multiples of it, so that what depends on a size is as aligned for each.
SMALLEST = 16
# Up to the next power of two: from 128 tokens on the padding is less than an eighth.
OCTAVE_SIZES = 8


def step_sizes(most: int) -> list[int]:
    """Ascending; the last is `most`, which full steps have."""
    sizes, size = [], SMALLEST
    while size < most:
        sizes.append(size)
        size += max((1 << size.bit_length() - 1) // OCTAVE_SIZES, SMALLEST)
    return [*sizes, most]


def padded_size(tokens: int, sizes: Sequence[int]) -> int:
    """The first of ascending `sizes` that holds so many tokens; the last one holds those of every step."""
    return sizes[bisect_left(sizes, tokens)]

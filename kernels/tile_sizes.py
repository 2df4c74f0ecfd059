"""Sizes of tiles and grids for launches of Triton kernels. Triton's own functions can be called in kernels too, and
take the host 1.5 us.
"""


def cdiv(whole: int, part: int) -> int:
    """How many parts make up the whole; the last one may be smaller."""
    return -(-whole // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()

"""What sparse attention of a prompt kept, as plain data."""

import msgspec


class SparseMeasure(msgspec.Struct, frozen=True, array_like=True):
    """What sparse attention kept of one chunk, in one layer."""

    # The share of the exact attention, the mean over its heads and some of its queries.
    recall: float
    # Which share of the blocks was computed that exact attention computes.
    density: float

"""What sparse attention of a prompt kept, as plain data."""

import msgspec


class SparseMeasure(msgspec.Struct, frozen=True, array_like=True):
    """What sparse attention kept of one chunk, in one layer."""

    # Which share of the exact attention was kept: the mean over the heads and some of the queries.
    recall: float
    # Which share of the blocks that exact attention computes was computed.
    density: float

"""What a worker reports of its experts' balance."""

import msgspec


class BalanceReport(msgspec.Struct, frozen=True, array_like=True):
    """At the last look, over the layers: (largest - mean) / mean of the parts' loads."""

    mean_imbalance: float
    largest_imbalance: float
    # How many slots have got another expert since the start, those since the last look included.
    moved: int

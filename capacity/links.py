"""Time that rows take to experts on other ranks and sums take back, by the links between a worker's GPUs."""

from dataclasses import dataclass

from engine.model.config import ModelConfig
from engine.model.quantization import WEIGHT_BLOCK
from engine.parallel.layout import Layout

# Each choice of an expert travels as its weight in float32 and its number.
CHOICE_BYTES = 12
BF16 = 2


@dataclass(frozen=True)
class Links:
    """What each GPU has: bytes a second in one direction, and seconds that an exchange takes however few bytes it has.
    Those of NVLink were measured between four H200 (docs/performance.md).
    """

    host_rate: float = 395e9
    host_seconds: float = 6e-6
    # A card of 400 Gb/s.
    network_rate: float = 50e9
    network_seconds: float = 25e-6


def exchange_seconds(
    config: ModelConfig, rows: int, layout: Layout, links: Links, *, wanted_only: bool, excess: float = 0.0
) -> float:
    """Seconds of one layer's exchange there and back, which nothing else overlaps. Choices are uniform.

    rows: of each rank, in FP8 on their way there and in bfloat16 on their way back; layout: one part of the experts a
    rank; wanted_only: rows go only where one of their experts is, once to each host (DeepEP), and else to all ranks;
    excess: of the rank that most rows go to, over the mean, if they go where they are wanted.
    """
    hosts, a_host, chosen = layout.hosts, layout.ranks_a_host, config.num_experts_per_tok
    row_bytes = config.hidden_size * (1 + 4 / WEIGHT_BLOCK + BF16) + CHOICE_BYTES * chosen
    if wanted_only:
        on_hosts, on_ranks = ((1 + excess) * _reached(places, chosen) for places in (hosts, layout.world))
    else:
        # Each rank of a host passes on what came to it from the ranks of its number.
        on_hosts, on_ranks = hosts - 1, hosts * (a_host - 1)
    network = 2 * links.network_seconds + rows * on_hosts * row_bytes / links.network_rate if hosts > 1 else 0.0
    host = 2 * links.host_seconds + rows * on_ranks * row_bytes / links.host_rate if a_host > 1 else 0.0
    return network + host


def _reached(places: int, chosen: int) -> float:
    """The expected number of other places with one of a token's experts."""
    return (places - 1) * (1 - (1 - 1 / places) ** chosen)

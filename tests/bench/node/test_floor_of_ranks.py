"""What the ranks of a node compute and receive, counted."""

import pytest

from bench.node.wire import wire_bytes
from bench.rank.floor import decode_operations
from bench.rank.model import SHAPES
from engine.model.config import ModelConfig, parse_model_config
from engine.parallel.layout import Layout

LAYOUTS = [Layout(dp=4, ep=4), Layout(dp=4, ep=2), Layout(tp=4, ep=4), Layout(tp=2, dp=2, ep=4)]
ROWS, CONTEXT = 96, 3500


def config() -> ModelConfig:
    return parse_model_config(dict(SHAPES["r1"]))


def total(layout: Layout, rows: int, name: str) -> tuple[float, ...]:
    """Bytes and FLOPs of all ranks in operations of that name."""
    operations = [each for each in decode_operations(config(), rows, CONTEXT, 1, layout=layout) if name in each.name]
    return tuple(layout.world * sum(getattr(each, field) for each in operations) for field in ("size_bytes", "flops"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["experts", "attention output", "head", "dense"])
def test_ranks_together_compute_what_one_would(layout: Layout, name: str) -> None:
    whole_bytes, whole_flops = total(Layout(), ROWS, name)
    size_bytes, flops = total(layout, ROWS // layout.dp, name)
    assert flops == pytest.approx(whole_flops)
    # Each group of a TP group's ranks reads the weights of all but experts once.
    assert size_bytes == pytest.approx(whole_bytes * (1 if name == "experts" else layout.dp))


def test_a_rank_receives_the_others_rows_and_their_sums_of_its_own() -> None:
    # Values, scales, weights and numbers of the experts of a row; then its sums in bfloat16.
    row = 7168 + 56 * 4 + 8 * (4 + 8) + 7168 * 2
    assert wire_bytes(config(), Layout(dp=4, ep=4), 64) == 58 * 3 * 64 * row
    assert wire_bytes(config(), Layout(), 64) == 0
    assert wire_bytes(config(), Layout(tp=2, ep=2), 64) > 58 * 32 * row

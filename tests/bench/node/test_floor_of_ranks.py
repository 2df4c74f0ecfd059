"""What the ranks of a node compute and receive, counted."""

import pytest

from bench.node.wire import guess_wire_bytes, wire_bytes
from capacity.floor import decode_operations, guess_operations
from capacity.shapes import SHAPES
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


def test_ranks_read_a_part_of_shared_experts_for_few_rows() -> None:
    (whole, flops), layout = total(Layout(), 32, "shared"), Layout(tp=4, ep=4)
    assert total(layout, 32, "shared") == pytest.approx((whole, flops))
    assert total(layout, 33, "shared")[0] == pytest.approx(4 * whole)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_together_guess_what_one_would(layout: Layout) -> None:
    def flops(layout: Layout) -> dict[str, float]:
        operations = list(guess_operations(config(), ROWS // layout.dp, CONTEXT, 1, 3, layout))
        divided = ("draft merge", "attention output", "experts down", "draft head")
        return {name: layout.world * sum(each.flops for each in operations if each.name == name) for name in divided}

    assert flops(layout) == pytest.approx(flops(Layout()))


def test_a_rank_receives_others_rows_and_its_sums() -> None:
    # Values, scales, weights and numbers of the experts of a row; then its sums in bfloat16.
    row = 7168 + 56 * 4 + 8 * (4 + 8) + 7168 * 2
    assert wire_bytes(config(), Layout(dp=4, ep=4), 64) == 58 * 3 * 64 * row
    assert wire_bytes(config(), Layout(), 64) == 0
    assert wire_bytes(config(), Layout(tp=2, ep=2), 64) > 58 * 32 * row


def test_a_rank_receives_what_it_needs_to_guess() -> None:
    dp, row = Layout(dp=4, ep=4), 7168 + 56 * 4 + 8 * (4 + 8) + 7168 * 2
    # A layer of experts: first of all tokens that are verified, then of one of each row.
    assert guess_wire_bytes(config(), dp, 64, 3) == 3 * 64 * row * (4 + 1 + 1)
    assert guess_wire_bytes(config(), dp, 64, 0) == 0
    # Two ranks of a TP group have half of the rows each, six times a guess, and half of the logits.
    tp = guess_wire_bytes(config(), Layout(tp=2, ep=2), 8, 1)
    assert tp == 8 * row + 6 * 8 * 2 * 7168 + 4 * 2 * 129280

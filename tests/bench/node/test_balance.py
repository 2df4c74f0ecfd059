"""The measurement of experts that move, on CPUs."""

import torch

from bench.node.balance import Moving
from bench.node.skew import SkewedLogits, zipf
from engine.balance.report import BalanceReport

EXPERTS = 8


def test_experts_are_drawn_as_often_as_they_are_popular() -> None:
    logits = SkewedLogits(1, EXPERTS, torch.device("cpu"))
    popularity = zipf(EXPERTS, 1.0)
    logits.set_popularity(popularity)
    drawn = logits.of_layer(0, torch.empty(1, 40_000, EXPERTS))[0].argmax(-1)
    shares = drawn.bincount(minlength=EXPERTS) / len(drawn)
    torch.testing.assert_close(shares, popularity / popularity.sum(), atol=0.01, rtol=0)


def test_the_window_is_from_the_first_move_to_the_last() -> None:
    reports = [None, *(BalanceReport(0.5, 0.5, moved) for moved in (0, 2, 2, 3, 3))]
    assert Moving([0.0] * 6, reports).window == range(2, 5)
    assert Moving([0.0], [None]).window == range(0)

"""The measurement of experts that move, on CPUs."""

from pathlib import Path

import pytest
import torch

from bench.node.balance import Moving, imbalances_of, move_experts
from bench.node.engines import RankEngine
from bench.node.skew import SkewedLogits, zipf
from bench.rank.model import make_rank
from engine.balance.config import BalanceConfig
from engine.balance.report import BalanceReport
from engine.config import EngineConfig, Hardware, resolve
from engine.exchange.host import HostExchange
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from tests.support.checkpoints import tiny_checkpoint
from tests.support.rank_threads import on_each_rank

EXPERTS = 8


def test_experts_are_drawn_as_often_as_they_are_popular() -> None:
    logits = SkewedLogits(1, EXPERTS, torch.device("cpu"))
    popularity = zipf(EXPERTS, 1.0)
    logits.set_popularity(popularity)
    drawn = logits.of_layer(0, torch.empty(1, 40_000, EXPERTS))[0].argmax(-1)
    shares = drawn.bincount(minlength=EXPERTS) / len(drawn)
    torch.testing.assert_close(shares, popularity / popularity.sum(), atol=0.01, rtol=0)


def test_ranks_measure_steps_in_which_popular_experts_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.node.balance.CONTEXT", 70)
    directory = tiny_checkpoint(tmp_path)

    def act(peers: Peers) -> Moving:
        config = EngineConfig(
            model_dir=directory, device="cpu", threads=1, max_requests=4, total_blocks=64, random_weights=True,
            parallel=ParallelConfig(tp=1, dp=2), balance=BalanceConfig(interval_steps=16, redundant=1),
        )  # fmt: skip
        resolved, exchange = resolve(config, Hardware(0, 1 << 30)), HostExchange(peers)
        made: list[SkewedLogits] = []

        def skewed(layers: int) -> SkewedLogits:
            made.append(SkewedLogits(layers, EXPERTS, torch.device("cpu")))
            return made[0]

        model = make_rank(resolved, exchange, skewed)
        made[0].set_popularity(zipf(EXPERTS, 2.0))
        engine = RankEngine(resolved, model, exchange, peers)
        moving = move_experts(engine, 4, 60)
        engine.stop()
        return moving

    one, other = on_each_rank(Layout(dp=2, ep=2), act)
    assert one.moved == other.moved and one.moved[0] == 0 < one.moved[-1]
    assert 0 < one.window.start < one.window.stop <= len(one.seconds) == 60
    assert imbalances_of(one)["skewed"] > imbalances_of(one)["balanced"]


def test_the_window_is_from_the_first_move_to_the_last() -> None:
    reports = [None, *(BalanceReport(0.5, 0.5, moved) for moved in (0, 2, 2, 3, 3))]
    assert Moving([0.0] * 6, reports).window == range(2, 5)
    assert Moving([0.0], [None]).window == range(0)

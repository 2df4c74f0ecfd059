"""The measurements by which ranks choose the steps that they compute in two micro-batches."""

import logging
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.exchange.host import HostExchange
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.step.two_batch import NEVER, TwoBatch
from tests.support.checkpoints import tiny_checkpoint
from tests.support.rank_threads import on_each_rank


def test_ranks_choose_alike_from_steps_of_each_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parallel = ParallelConfig(tp=1, dp=2, two_batch="auto")
    config = EngineConfig(
        model_dir=tiny_checkpoint(tmp_path, num_hidden_layers=2),
        device="cpu",
        parallel=parallel,
        max_requests=6,
        max_step_tokens=64,
        total_blocks=4,
        threads=1,
    )

    def chosen(peers: Peers) -> TwoBatch:
        backend = ModelBackend(resolve(config, Hardware(0, 1 << 30)), exchange=HostExchange(peers))
        return backend.steps.batches.two_batch

    with caplog.at_level(logging.INFO, logger="deepmesh.engine"):
        one, other = on_each_rank(Layout(dp=2, ep=2), chosen)
    assert one == other
    assert [tokens for tokens, _ in one.decoding] == [2, 4, 6]
    assert [tokens for tokens, _ in one.prompts] == [2, 4, 8, 16, 32, 64]
    fields = [vars(record).get("fields", {}) for record in caplog.records]
    told = [each for each in fields if "one_ms" in each]
    assert len(told) == 2 * 9 and all(each["one_ms"] > 0 < each["two_ms"] for each in told)


def test_a_rank_alone_measures_nothing(tmp_path: Path) -> None:
    parallel = ParallelConfig(two_batch="auto")
    config = EngineConfig(
        model_dir=tiny_checkpoint(tmp_path, num_hidden_layers=2), device="cpu", parallel=parallel, total_blocks=4
    )
    assert ModelBackend(resolve(config, Hardware(0, 1 << 30))).steps.batches.two_batch == NEVER

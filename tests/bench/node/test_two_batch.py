"""The timing of steps in two micro-batches, on CPUs."""

from pathlib import Path

import torch

from bench.node.muted import MutedExchange
from bench.node.two_batch import WAYS, Case, Options, measure_steps, table
from bench.rank.model import MeasuredModel
from engine.exchange.host import HostExchange
from engine.model.state import make_state
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.runner.two_batch_times import StepTimer
from engine.weights.loading import load_model
from tests.support.checkpoints import tiny_checkpoint
from tests.support.rank_threads import on_each_rank

LAYOUT = Layout(tp=2, dp=1, ep=2)


def test_ranks_time_steps_whole_in_two_and_muted(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, num_hidden_layers=2)

    def measure(peers: Peers) -> list[Case]:
        cpu, exchange = torch.device("cpu"), MutedExchange(HostExchange(peers))
        model = load_model(directory, torch.float32, cpu, exchange=exchange)
        state = make_state(model.config, cpu, blocks=1, positions=40, rows=1, kv_dtype=torch.float32)
        timer = StepTimer(model, state, 40, lambda tokens: tokens, graphs=False)
        return measure_steps(timer, exchange, Options(LAYOUT, MeasuredModel("", 2, ""), (3,), (50,), 2))

    one, other = on_each_rank(LAYOUT, measure)
    assert one == other
    assert [(case.kind, case.tokens) for case in one] == [("decode", 3), ("prompts", 50)]
    assert all(tuple(case.seconds) == WAYS and min(case.seconds.values()) > 0 for case in one)
    assert table(one, LAYOUT).row_count == 2

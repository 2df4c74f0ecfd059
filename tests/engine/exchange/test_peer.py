"""Exchange between GPUs, each rank in a process of its own, against its definition."""

import os
from functools import partial

import pytest
import torch

from bench.exchange.processes import exchanging, on_each_gpu, start_ranks
from engine.parallel.layout import Layout
from tests.support.exchanging import WAIT_SECONDS, exchange_at_random, lose_the_last, replay, soak

pytestmark = pytest.mark.multi_gpu
# With fewer than four GPUs, two ranks of the third layout share a GPU.
LAYOUTS = [Layout(dp=2), Layout(tp=2), Layout(tp=2, dp=2), pytest.param(Layout(dp=4), marks=pytest.mark.multi_gpu(4))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_tensors_are_exchanged_bit_for_bit(layout: Layout) -> None:
    on_each_gpu(layout, exchange_at_random)


@pytest.mark.parametrize("layout", [Layout(dp=2), pytest.param(Layout(tp=4), marks=pytest.mark.multi_gpu(4))])
def test_graphs_exchange_what_their_inputs_hold_at_each_replay(layout: Layout) -> None:
    on_each_gpu(layout, replay)


def test_waiting_for_a_killed_rank_fails_in_time() -> None:
    first, last = start_ranks(Layout(dp=2), partial(exchanging, lose_the_last))
    assert first.result() < 5 * WAIT_SECONDS
    with pytest.raises(RuntimeError, match="has ended"):
        last.result()


@pytest.mark.check("exchange-soak")
@pytest.mark.timeout(0)
def test_thousands_of_replays_stay_right() -> None:
    """Between all GPUs, for DEEPMESH_SOAK_SECONDS."""
    seconds = float(os.environ.get("DEEPMESH_SOAK_SECONDS", "25"))
    rounds = on_each_gpu(Layout(tp=torch.cuda.device_count()), partial(soak, seconds=seconds))
    assert all(each > 1 for each in rounds)

"""What exchanges between ranks take, by the links between them."""

import pytest

from capacity.links import Links, exchange_seconds
from capacity.shapes import DEEPSEEK_R1
from engine.model.config import parse_model_config
from engine.parallel.layout import Layout

R1 = parse_model_config(dict(DEEPSEEK_R1))
ROW_BYTES = 7168 * 3 + 56 * 4 + 8 * 12
WIRE = Links(host_rate=1e9, host_seconds=0.0, network_rate=1e9, network_seconds=0.0)


def layout(gpus: int, hosts: int) -> Layout:
    return Layout(dp=gpus, ep=gpus, hosts=hosts)


def test_one_rank_exchanges_nothing() -> None:
    assert exchange_seconds(R1, 64, layout(1, 1), Links(), wanted_only=False) == 0


@pytest.mark.parametrize(("gpus", "hosts", "copies"), [(8, 1, 7), (2, 2, 1), (16, 2, 1 + 2 * 7), (32, 4, 3 + 4 * 7)])
def test_all_rows_reach_every_rank_once_over_each_link(gpus: int, hosts: int, copies: int) -> None:
    seconds = exchange_seconds(R1, 10, layout(gpus, hosts), WIRE, wanted_only=False)
    assert seconds == pytest.approx(10 * copies * ROW_BYTES / 1e9)


def test_a_wanted_row_goes_once_to_each_wanted_host() -> None:
    network = Links(host_rate=1e30, host_seconds=0.0, network_rate=1e9, network_seconds=0.0)
    # docs/scale-out.md: 2.70 other hosts of four.
    seconds = exchange_seconds(R1, 10, layout(32, 4), network, wanted_only=True)
    assert seconds * 1e9 / (10 * ROW_BYTES) == pytest.approx(2.70, abs=0.005)
    assert exchange_seconds(R1, 10, layout(32, 4), network, wanted_only=True, excess=1) == pytest.approx(2 * seconds)


def test_a_layer_pays_each_latency_twice() -> None:
    seconds = exchange_seconds(R1, 0, layout(16, 2), Links(host_seconds=1, network_seconds=10), wanted_only=False)
    assert seconds == 22

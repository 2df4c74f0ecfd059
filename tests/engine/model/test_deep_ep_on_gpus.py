"""Compares DeepEP's second version, if there is a build of it, with our own exchange. One host stands in for several.

On a host without network cards DeepEP needs EP_DISABLE_GIN=1.
"""

import pytest

from bench.exchange.processes import on_each_gpu
from engine.parallel.layout import Layout
from kernels.vendor import find_package
from tests.support.deep_ep_on_gpus import replay, send_both_ways

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(180)]
LAYOUT = Layout(dp=2, ep=2)


@pytest.fixture(autouse=True)
def package() -> None:
    if find_package("deep_ep", ["ElasticBuffer"]) is None:
        pytest.skip("there is no deep_ep with an ElasticBuffer")


def test_sums_come_back_as_by_our_own_exchange() -> None:
    on_each_gpu(LAYOUT, send_both_ways)


def test_a_graph_sends_what_its_inputs_hold_at_each_replay() -> None:
    on_each_gpu(LAYOUT, replay)

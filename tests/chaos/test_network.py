"""The network fails between processes that live on: parts of the mesh are cut off from the others, in both directions
or in one, and links are slow. No token is lost, repeated or changed, nothing is held afterwards, and processes that
were cut off are back soon after the network has healed. UCX reports no partition for at least 90 s: our deadlines
must."""

import asyncio
import os
from functools import partial

import pytest

from tests.support.chaos import PHASES, SITES, ChaosMesh, chaos_mesh, run_cell
from tests.support.network import Network, network, why_no_network

SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
TARGETS = ("prefill-0", "decode-0", "scheduler", "kvstore-0", "gateway", "redis")
# Pairs of processes that cannot reach each other, while all others reach both.
PAIRS = (
    ("gateway", "decode-0"),
    ("prefill-0", "decode-0"),
    ("kvstore-0", "decode-0"),
    ("kvstore-0", "prefill-0"),
    ("scheduler", "decode-0"),
    ("scheduler", "prefill-0"),
    ("scheduler", "gateway"),
    ("scheduler", "kvstore-0"),
    ("redis", "kvstore-0"),
)
# Which packets of the target are lost: all, those that it sends, or those sent to it.
WAYS = ("both", "out", "in")
SHORT_SECONDS, LONG_SECONDS = 3.0, 20.0
SLOW = ("10mbit", "200ms", "5%")
SLOW_SECONDS = 5.0
pytestmark = [
    pytest.mark.check("chaos"),
    pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}"),
]


async def partition(net: Network, target: str, way: str, seconds: float, chaos: ChaosMesh) -> None:
    if way != "in":
        net.cut(target)
    if way != "out":
        net.cut_towards(target)
    await asyncio.sleep(seconds)
    net.heal()


async def separate(net: Network, first: str, second: str, seconds: float, chaos: ChaosMesh) -> None:
    net.cut(first, second)
    net.cut(second, first)
    await asyncio.sleep(seconds)
    net.heal()


async def slow_down(net: Network, target: str, how: str, chaos: ChaosMesh) -> None:
    if how == "10mbit":
        net.limit(target, 10)
    elif how == "200ms":
        net.delay(target, 0.2)
    else:
        net.lose(target, 5)
    await asyncio.sleep(SLOW_SECONDS)
    net.heal()


@pytest.mark.parametrize("seconds", [SHORT_SECONDS, LONG_SECONDS])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", TARGETS)
async def test_whoever_is_cut_off(target: str, way: str, seconds: float) -> None:
    with network(SITES) as net:
        async with chaos_mesh(net) as chaos:
            for phase in PHASES:
                strike = partial(partition, net, target, way, seconds)
                await run_cell(chaos, f"{target} partition {way} {seconds:g} s", phase, strike, SEED)


@pytest.mark.parametrize("seconds", [SHORT_SECONDS, LONG_SECONDS])
@pytest.mark.parametrize("first, second", PAIRS)
async def test_two_that_do_not_reach_each_other(first: str, second: str, seconds: float) -> None:
    with network(SITES) as net:
        async with chaos_mesh(net) as chaos:
            for phase in PHASES:
                strike = partial(separate, net, first, second, seconds)
                await run_cell(chaos, f"{first} from {second} {seconds:g} s", phase, strike, SEED)


@pytest.mark.parametrize("how", SLOW)
@pytest.mark.parametrize("target", TARGETS)
async def test_a_slow_link(target: str, how: str) -> None:
    with network(SITES) as net:
        async with chaos_mesh(net) as chaos:
            for phase in PHASES:
                await run_cell(chaos, f"{target} {how}", phase, partial(slow_down, net, target, how), SEED)

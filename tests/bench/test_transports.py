"""KV between two processes with namespaces of their own: `python -m bench.transports` has all combinations."""

import pytest

from bench.kv_push.pools import Geometry
from bench.transports.__main__ import LAYERS, PIECE_BYTES, SHARINGS, Measured, Pair, Sharing
from bench.transports.containers import two_networks, why_no_containers

pytestmark = [
    pytest.mark.check("hosts"),
    pytest.mark.skipif(why_no_containers() is not None, reason=f"{why_no_containers()}"),
]
GEOMETRY = Geometry(LAYERS, 8, PIECE_BYTES)


@pytest.mark.parametrize(
    ("sharing", "by_tcp"),
    [(SHARINGS[0], False), (SHARINGS[1], True), (SHARINGS[2], False)],
    ids=[sharing.name for sharing in SHARINGS[:3]],
)
def test_without_shared_ipc_kv_takes_tcp_and_is_warned_of(sharing: Sharing, by_tcp: bool) -> None:
    with two_networks() as networks, Pair(sharing, networks, GEOMETRY) as pair:
        found = pair.measure(rounds=1)
    assert isinstance(found, Measured)
    assert ("tcp" in found.transport, found.warned) == (by_tcp, by_tcp)

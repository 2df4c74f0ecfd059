"""Which bytes count as having gone over TCP for no reason."""

import pytest

from transfer.origin import LocalTcp, Origin, own_origin

OWN = Origin("boot-1", "decode-0", processes=7)


@pytest.mark.parametrize(
    ("transport", "counts"),
    [
        ("tcp", True),
        ("cuda_copy+tcp", True),
        ("posix", False),
        ("cma+tcp", False),
        ("cuda_ipc+tcp", False),
        ("cuda_ipc", False),
        ("rc_mlx5", False),
    ],
)
def test_tcp_within_a_host_is_counted(transport: str, counts: bool) -> None:
    local = LocalTcp(OWN)
    for size in (100, 20):
        assert local.see(Origin("boot-1", "prefill-0", processes=7), transport, size) == transport
    assert local.bytes.counts == ({"prefill-0": 120} if counts else {})


@pytest.mark.parametrize(("named", "carried"), [("cuda_ipc", "cuda_copy"), ("cuda_ipc+tcp", "cuda_copy+tcp")])
def test_cuda_ipc_does_not_reach_another_pid_namespace(named: str, carried: str) -> None:
    local = LocalTcp(OWN)
    assert local.see(Origin("boot-1", "prefill-0", processes=8), named, 100) == carried
    assert local.bytes.counts == {"prefill-0": 100}
    # A sender of an older version does not tell.
    assert local.see(Origin("boot-1", "prefill-1"), named, 100) == named


@pytest.mark.parametrize(
    ("own", "sender"),
    [(OWN, Origin("boot-2", "prefill-0")), (OWN, None), (None, Origin("boot-1", "prefill-0"))],
    ids=["another host", "sender was told", "receiver was told"],
)
def test_tcp_that_has_a_reason_is_not_counted(own: Origin | None, sender: Origin | None) -> None:
    local = LocalTcp(own)
    local.see(sender, "tcp", 100)
    assert not local.bytes.counts


def test_a_peer_that_invents_names_fills_no_memory() -> None:
    local = LocalTcp(OWN)
    for number in range(1000):
        local.see(Origin("boot-1", f"{number}" * 1000), "tcp", 1)
    assert len(local.bytes.counts) == 256
    assert max(map(len, local.bytes.counts)) == 64


def test_processes_of_one_host_have_one_origin() -> None:
    origin = own_origin()
    assert origin is not None and origin == own_origin() and origin.host and origin.processes

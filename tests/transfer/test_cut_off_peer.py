"""A peer that the network does not reach any more, over real UCX between two namespaces."""

import subprocess
import sys

import pytest

from tests.support.network import Network, network, why_no_network

pytestmark = pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")

# Says its address, and goes on for as long as its input is open.
LISTEN = """
import sys
from transfer.ucx import UcxTransport
print(UcxTransport("tcp", "eth0").address.hex(), flush=True)
sys.stdin.read()
"""
# Sends to that address, and says when it may do something else.
SEND = """
import sys
from transfer.ucx import UcxTransport
transport = UcxTransport("tcp", "eth0")
request = transport.send(bytes.fromhex(sys.argv[1]), 1, bytearray(64))
for _ in range(100):
    transport.progress()
print("completed" if request.completed else "under way", flush=True)
transport.close()
"""
# A thread that connects and waits is back after two minutes.
PATIENCE_SECONDS = 60


def python(net: Network, site: str, code: str, *arguments: str) -> list[str]:
    return [*net.inside(site), sys.executable, "-c", code, *arguments]


def test_a_thread_that_sends_to_a_cut_off_peer_continues() -> None:
    with network(["sender", "receiver"]) as net:
        with subprocess.Popen(
            python(net, "receiver", LISTEN), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout is not None
            address = receiver.stdout.readline().strip()
            net.cut("receiver")
            sent = subprocess.run(
                python(net, "sender", SEND, address), capture_output=True, text=True, timeout=PATIENCE_SECONDS
            )
            assert receiver.stdin is not None
            receiver.stdin.close()
        assert sent.stdout == "under way\n", sent.stderr

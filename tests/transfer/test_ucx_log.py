"""Garbage on UCX's port: one line in our log, and UCX goes on."""

import socket
import time

import psutil
import pytest

from tests.support.waiting import wait_until
from transfer.transport import Arrival
from transfer.ucx import UcxTransport
from transfer.ucx_log import UcxLog

# What a connection of UCX over TCP begins with; without it UCX closes it at once.
MAGIC = 0xCAFEBABE12345678.to_bytes(8, "little")
# A few accept a connection and read what it brought.
LEAST_ROUNDS = 1000


def test_garbage_gives_one_line_and_a_transfer_goes_on(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    before = listening()
    transport = UcxTransport("tcp", "lo")
    log = UcxLog()
    capfd.readouterr()
    try:
        (port,) = listening() - before
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                # Messages of an active message id without a handler.
                peer.sendall(MAGIC + bytes(200))
                progress(transport, 0.1)
        message = b"still here"
        transport.send(transport.address, 7, message)
        arrival = next_arrival(transport)
        assert (arrival.tag, arrival.size_bytes) == (7, len(message))
        transport.discard(arrival)
        progress(transport, 0.05)
    finally:
        log.close()
        transport.close()
    (message_logged,) = caplog.messages
    assert "no handler installed" in message_logged
    assert capfd.readouterr().out == ""


def listening() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def next_arrival(transport: UcxTransport) -> Arrival:
    arrivals: list[Arrival] = []

    def arrived() -> bool:
        transport.progress()
        if (arrival := transport.next_arrival()) is not None:
            arrivals.append(arrival)
        return bool(arrivals)

    wait_until(arrived)
    return arrivals[0]


def progress(transport: UcxTransport, seconds: float) -> None:
    """For so long, and however long the process stood still meanwhile, often enough for what has come by then."""
    deadline, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < deadline or rounds < LEAST_ROUNDS:
        transport.progress()
        rounds += 1

"""Clients of the metrics port that send no request."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from mesh.observe import metrics_http
from mesh.observe.metrics_http import MetricsServer
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def server() -> Iterator[MetricsServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_http, "REQUEST_SECONDS", 0.05)
        server = MetricsServer("test", "127.0.0.1", 0)
        yield server
        server.stop()


def ended() -> None:
    """Wait for the threads of connections."""
    for thread in threading.enumerate():
        if "process_request" in thread.name:
            thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize("sent", [b"", b"GET /metr"])
def test_a_connection_without_a_request_is_closed(
    sent: bytes, server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(sent)
        assert client.recv(1) == b""
    ended()
    assert capfd.readouterr().err == ""


def test_a_request_of_single_bytes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "REQUEST_SECONDS", 0.5)
    server = MetricsServer("test", "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client, pytest.raises(ConnectionError):
            # A line may have 65,536 bytes.
            for _ in range(20_000):
                client.sendall(b"G")
                time.sleep(0.001)
    finally:
        server.stop()


def test_a_connection_that_is_reset_leaves_no_traceback(
    server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /metr")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # Taken only after the connection before it.
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS) as next_client:
        assert next_client.recv(1) == b""
    ended()
    assert capfd.readouterr().err == ""


def test_more_connections_than_have_room_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that send nothing keep their threads for `REQUEST_SECONDS`; the third one has none."""
    monkeypatch.setattr(metrics_http, "MOST_CONNECTIONS", 2)
    server = MetricsServer("test", "127.0.0.1", 0)
    address = ("127.0.0.1", server.port)
    try:
        held = [socket.create_connection(address) for _ in range(2)]
        with socket.create_connection(address, timeout=metrics_http.REQUEST_SECONDS / 2) as refused:
            assert refused.recv(1) == b""
        for client in held:
            client.close()
        ended()
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as scrape:
            scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert scrape.recv(15) == b"HTTP/1.0 200 OK"
    finally:
        server.stop()

"""The line from a host's first rank to other hosts, at the rank's end."""

import os
import socket
import threading

import pytest

from engine.parallel.host_line import END, HEADER, HostLine
from mesh.errors import RankLost


def line_over(connection: socket.socket, arrived: threading.Event | None = None) -> HostLine:
    """The first of two hosts. The connection stays open, as a rank's does."""
    ours = socket.socket(fileno=os.dup(connection.fileno()))
    return HostLine(ours, 0, 2, (arrived or threading.Event()).set, lambda: None, 20.0)


def test_a_broken_line_fails_once_its_records_are_read() -> None:
    ours, theirs = socket.socketpair()
    others, arrived = HostLine(theirs, 1, 2, lambda: None, lambda: None, 20.0), threading.Event()
    line = HostLine(ours, 0, 2, arrived.set, lambda: None, 20.0)
    sending = threading.Thread(target=others.exchange, args=(b"theirs",))
    sending.start()
    assert arrived.wait(20) and line.due
    assert line.exchange(b"ours") == [b"theirs"] and not line.due
    sending.join()
    others.close()
    with pytest.raises(RankLost, match="has ended"):
        line.exchange(b"more")


def test_an_error_names_the_host_that_does_not_answer() -> None:
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(RankLost, match=r"host 1 has not answered for 0.2 s"):
        HostLine(ours, 0, 2, lambda: None, lambda: None, 0.2).exchange(b"ours")


def test_a_rank_wakes_when_its_service_ends_the_line() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arrived = threading.Event()
        line = line_over(ours, arrived)
        assert not line.due
        theirs.sendall(END)
        assert arrived.wait(20) and line.due and line.ended
        with pytest.raises(RankLost, match="has ended"):
            line.exchange(b"ours")
        assert line.leave(20)


def test_a_rank_leaves_only_after_its_service_ends_the_line() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = line_over(ours)
        assert not line.leave(0)
        theirs.sendall(END)
        assert line.leave(20)
        assert theirs.recv(100, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == END + END


def test_a_later_line_gets_no_record_of_an_earlier_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEADER.pack(1, 5) + b"stale" + END)
        assert line_over(ours).leave(20)
        arrived = threading.Event()
        line = line_over(ours, arrived)
        theirs.sendall(HEADER.pack(1, 3) + b"new")
        assert arrived.wait(20) and line.exchange(b"ours") == [b"new"]
        line.close()

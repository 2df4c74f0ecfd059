import socket
import threading
import time

from engine.protocol.frames import FrameDecoder, FrameEncoder
from engine.protocol.messages import Cancel, FromRank, StepResult, Stop, ToRank
from engine.rank.link import MAX_OUTGOING_BYTES, RankLink
from mesh.domain.workers import WorkerLoad
from mesh.event_fd import EventFd

LOAD = WorkerLoad()


def linked(wakeup: EventFd | None = None) -> tuple[RankLink, socket.socket]:
    """A rank's link, and the service's end of it."""
    theirs, ours = socket.socketpair()
    ours.settimeout(60)
    return RankLink(theirs, wakeup or EventFd()), ours


def frame(message: ToRank) -> bytes:
    return bytes(FrameEncoder().encode(message))


def result(step: int, size: int = 16) -> StepResult:
    return StepResult(step, [], LOAD, stored_blocks=[bytes(size)])


def read_steps(service: socket.socket, count: int) -> list[int]:
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    steps: list[int] = []
    while len(steps) < count:
        steps += [message.step for message in decoder.feed(service.recv(1 << 20)) if isinstance(message, StepResult)]
    return steps


def test_messages_that_arrived_together_are_received_together() -> None:
    link, service = linked()
    service.sendall(frame(Cancel(1)) + frame(Cancel(2)))
    service.sendall(frame(Cancel(3)))
    assert link.receive(wait=True) == [Cancel(1), Cancel(2), Cancel(3)]


def test_without_waiting_an_empty_socket_gives_nothing() -> None:
    link, _service = linked()
    assert link.receive(wait=False) == []
    assert not link.closed


def test_waiting_sleeps_until_a_message_is_whole() -> None:
    link, service = linked()
    whole = frame(Cancel(7))
    service.sendall(whole[:3])
    threading.Timer(0.05, service.sendall, [whole[3:]]).start()
    started = time.thread_time()
    assert link.receive(wait=True) == [Cancel(7)]
    assert time.thread_time() - started < 0.04


def test_waiting_ends_when_another_thread_wakes() -> None:
    wakeup = EventFd()
    link, service = linked(wakeup)
    threading.Timer(0.05, wakeup.set).start()
    assert link.receive(wait=True) == []
    threading.Timer(0.05, service.sendall, [frame(Cancel(7))]).start()
    assert link.receive(wait=True) == [Cancel(7)]


def test_waiting_ends_after_the_time_given() -> None:
    link, _service = linked()
    assert link.receive(wait=True, most_seconds=0.01) == []


def test_a_wake_before_the_wait_is_not_lost() -> None:
    wakeup = EventFd()
    link, _service = linked(wakeup)
    wakeup.set()
    wakeup.set()
    assert link.receive(wait=True) == []


def test_a_closed_socket_is_noticed_after_its_last_message() -> None:
    link, service = linked()
    service.sendall(frame(Stop()))
    service.close()
    assert link.receive(wait=True) == [Stop()]
    assert link.closed


def test_sending_to_a_service_that_has_gone_closes_the_link() -> None:
    link, service = linked()
    service.close()
    link.send(result(0))
    assert link.closed


def test_results_beyond_the_sockets_buffer_wait_and_arrive_in_order() -> None:
    link, service = linked()
    for step in range(30):
        link.send(result(step, size=100_000))
    received: list[int] = []
    reader = threading.Thread(target=lambda: received.extend(read_steps(service, 30)))
    reader.start()
    link.flush()
    reader.join()
    assert received == list(range(30))


def test_a_service_that_does_not_read_pauses_a_listening_rank() -> None:
    link, service = linked()
    for step in range(12):
        link.send(result(step, size=500_000))
    messages: list[ToRank] = []

    def receive() -> None:
        messages.extend(link.receive(wait=False))
        link.flush()

    rank = threading.Thread(target=receive)
    rank.start()
    # More than the socket holds: somebody must be reading.
    service.sendall(frame(Cancel(5)) * 100_000)
    rank.join(timeout=0.2)
    assert rank.is_alive()
    assert read_steps(service, 12) == list(range(12))
    rank.join()
    assert messages.count(Cancel(5)) == 100_000


def test_a_service_that_reads_a_little_late_pauses_no_rank() -> None:
    link, _service = linked()
    for step in range(5):
        link.send(result(step, size=MAX_OUTGOING_BYTES // 6))
    assert link.receive(wait=False) == []

import threading
import time
from typing import Any

from mesh.event_fd import EventFd
from tests.support.waiting import PATIENCE_SECONDS
from transfer.thread import TransferThread


class Meeting:
    """A transport to which a message comes, for what is posted while it progresses; and the work that takes it."""

    needs_polling = False
    in_flight = False
    busy_poll_seconds = 0.0
    next_deadline = None

    def __init__(self) -> None:
        self.thread: TransferThread
        self.started, self.over = threading.Event(), threading.Event()
        self.opened = False
        self.open_at_arrival: bool | None = None
        self._arrived = False
        self._wakeup = EventFd()
        self.fileno = self._wakeup.fileno

    def begin(self) -> None:
        self.started.wait()

    def arm(self) -> bool:
        return False

    def progress(self) -> None:
        if not self._arrived:
            self.thread.post(self._open)
            self._arrived = True

    def poll(self) -> bool:
        if self.open_at_arrival is None:
            self.open_at_arrival = self.opened
            self.over.set()
        return False

    def drop_dead_peers(self) -> None: ...

    def close(self) -> None:
        self._wakeup.close()

    def _open(self) -> None:
        self.opened = True


def test_a_message_finds_the_landing_posted_before_it() -> None:
    meeting: Any = Meeting()
    meeting.thread = TransferThread(meeting, meeting, time.monotonic, lambda: None)
    meeting.started.set()
    assert meeting.over.wait(PATIENCE_SECONDS)
    meeting.thread.close()
    assert meeting.open_at_arrival

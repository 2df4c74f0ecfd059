import mmap
import threading
import time

import pytest

from engine.parallel.semaphores import SEMAPHORE_BYTES, Semaphores


def test_a_wait_outlives_a_change_of_the_machines_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, SEMAPHORE_BYTES) as memory:
        semaphores = Semaphores(memory, 0, 1)
        semaphores.create()
        assert not semaphores.take(0, 0.001)
        # As if it had been set ahead by hours since the wait began.
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        threading.Timer(0.01, semaphores.post, [0]).start()
        assert semaphores.take(0, 60)
        del semaphores

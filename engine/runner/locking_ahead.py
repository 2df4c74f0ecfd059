"""A thread that page-locks a store's memory before it is read, as the store fills it."""

import time
import weakref
from collections.abc import Callable
from threading import Event, Thread

from engine.runner.locked_regions import LockedRegions

# How often it looks whether the store has filled more.
LOOK_SECONDS = 0.5
# How long it rests after a region, in times what that took: the driver keeps launches waiting meanwhile.
REST = 4


def lock_ahead(
    owner: object, regions: LockedRegions, is_filled: Callable[[int, int], bool], begin: Callable[[], None]
) -> None:
    """Lock regions in order, each once it is filled, until all are locked or `owner` goes. begin: called first in the
    thread; regions, is_filled: must not refer to the owner.
    """
    ended = Event()

    def run() -> None:
        begin()
        while not regions.all_locked:
            began = time.monotonic()
            locked = regions.lock_next(is_filled)
            if ended.wait(REST * (time.monotonic() - began) if locked else LOOK_SECONDS):
                return

    thread = Thread(target=run, name="locks-ahead", daemon=True)
    thread.start()
    weakref.finalize(owner, _end, ended, thread)


def _end(ended: Event, thread: Thread) -> None:
    ended.set()
    thread.join()

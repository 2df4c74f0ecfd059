"""What a GPU waits for ends with its group."""

import threading

from engine.exchange.group_watch import GroupWatch


def test_a_broken_group_ends_what_its_device_waits_for() -> None:
    broken, aborted = threading.Event(), threading.Event()
    watch = GroupWatch(aborted.set, broken.is_set)
    assert not watch.given_up
    broken.set()
    assert aborted.wait(60) and watch.given_up


def test_a_rank_that_leaves_its_group_aborts() -> None:
    aborted = threading.Event()
    watch = GroupWatch(aborted.set, lambda: False)
    watch.give_up()
    assert watch.given_up and aborted.wait(60)

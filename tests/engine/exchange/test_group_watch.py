"""What a GPU waits for ends with its group."""

import threading

from engine.exchange.group_watch import GroupWatch


def test_a_broken_group_ends_what_its_device_waits_for() -> None:
    broken, aborted, acts = threading.Event(), threading.Event(), list[str]()

    def abort() -> None:
        acts.append("abort")
        aborted.set()

    GroupWatch(lambda: acts.append("tell"), abort, broken.is_set)
    assert not acts
    broken.set()
    # No rank may take what follows for good.
    assert aborted.wait(60) and acts == ["tell", "abort"]


def test_a_rank_that_leaves_its_group_aborts() -> None:
    told, aborted = threading.Event(), threading.Event()
    GroupWatch(told.set, aborted.set, lambda: False).give_up()
    assert told.is_set() and aborted.wait(60)

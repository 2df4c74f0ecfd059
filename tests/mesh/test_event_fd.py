import select

from mesh.event_fd import EventFd


def test_it_is_readable_from_a_set_until_a_clear() -> None:
    event = EventFd()
    for _ in range(2):
        assert not readable(event) and not event.clear()
        event.set()
        event.set()
        assert readable(event) and event.clear()
    event.close()


def readable(event: EventFd) -> bool:
    return bool(select.select([event], [], [], 0)[0])

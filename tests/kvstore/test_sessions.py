import pytest

from kvstore.sessions import Session, Sessions
from mesh.errors import Overloaded, UnknownSession
from tests.support.store_agent import worker_identity


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sessions(limit: int = 8) -> tuple[Sessions, Clock, list[Session]]:
    clock, closed = Clock(), list[Session]()
    return Sessions(clock, 10.0, limit, closed.append), clock, closed


def test_attaching_again_renews_the_session() -> None:
    kept, clock, closed = sessions()
    session = kept.attach(worker_identity())
    for clock.now in (9.0, 18.0, 27.0):
        assert kept.attach(worker_identity()) is session
    assert kept.get(session.session_id) is session
    assert not closed


def test_a_session_that_is_not_renewed_ends() -> None:
    kept, clock, closed = sessions()
    session = kept.attach(worker_identity())
    clock.now = 10.0
    with pytest.raises(UnknownSession):
        kept.get(session.session_id)
    assert closed == [session]


@pytest.mark.parametrize("change", [{"incarnation": "second"}, {"weights": "other"}])
def test_another_incarnation_or_namespace_ends_the_session(change: dict[str, str]) -> None:
    kept, _, closed = sessions()
    first = kept.attach(worker_identity())
    second = kept.attach(worker_identity(**change))
    assert closed == [first]
    assert (second.session_id, second.key) != (first.session_id, first.key)


def test_workers_have_sessions_of_their_own() -> None:
    kept, _, _ = sessions()
    a, b = kept.attach(worker_identity("a")), kept.attach(worker_identity("b"))
    assert a.session_id != b.session_id and a.key != b.key
    assert a.digest == b.digest
    assert kept.attach(worker_identity("c", weights="other")).digest != a.digest


def test_sessions_beyond_the_limit_are_refused_until_one_ends() -> None:
    kept, clock, _ = sessions(limit=1)
    kept.attach(worker_identity("a"))
    with pytest.raises(Overloaded):
        kept.attach(worker_identity("b"))
    clock.now = 10.0
    kept.attach(worker_identity("b"))

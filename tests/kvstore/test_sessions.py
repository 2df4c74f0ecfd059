import pytest

from kvstore.sessions import RankSession, RankSessions
from mesh.errors import Overloaded, UnknownSession
from tests.support.store_agent import worker_identity


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sessions(limit: int = 8) -> tuple[RankSessions, Clock, list[RankSession]]:
    clock, closed = Clock(), list[RankSession]()
    return RankSessions(clock, 10.0, limit, closed.append), clock, closed


def test_a_session_that_is_named_is_renewed() -> None:
    kept, clock, closed = sessions()
    session = kept.attach(worker_identity(), 0, 0)
    for clock.now in (9.0, 18.0, 27.0):
        assert kept.attach(worker_identity(), 0, session.session_id) is session
    assert kept.get(session.session_id) is session
    assert not closed


def test_a_session_that_is_not_renewed_ends() -> None:
    kept, clock, closed = sessions()
    session = kept.attach(worker_identity(), 0, 0)
    clock.now = 10.0
    with pytest.raises(UnknownSession):
        kept.get(session.session_id)
    assert closed == [session]
    assert kept.attach(worker_identity(), 0, session.session_id) is not session


def test_a_worker_that_names_no_session_gets_a_new_one() -> None:
    kept, _, closed = sessions()
    first = kept.attach(worker_identity(), 0, 0)
    second = kept.attach(worker_identity(), 0, 0)
    assert closed == [first]
    assert (second.session_id, second.key) != (first.session_id, first.key)


def test_another_namespace_or_worker_cannot_renew_a_session() -> None:
    kept, _, closed = sessions()
    first = kept.attach(worker_identity(), 0, 0)
    assert kept.attach(worker_identity("other"), 0, first.session_id) is not first
    assert not closed
    assert kept.attach(worker_identity(weights="other"), 0, first.session_id) is not first
    assert closed == [first]


def test_each_rank_of_a_worker_has_its_own_session() -> None:
    kept, _, closed = sessions()
    first, second = kept.attach(worker_identity(), 0, 0), kept.attach(worker_identity(), 1, 0)
    assert first.session_id != second.session_id
    assert kept.attach(worker_identity(), 0, first.session_id) is first
    assert kept.attach(worker_identity(), 1, second.session_id) is second
    assert (len(kept), kept.workers, closed) == (2, 1, [])


def test_workers_of_one_namespace_share_its_blocks() -> None:
    kept, _, _ = sessions()
    a, b = kept.attach(worker_identity("a"), 0, 0), kept.attach(worker_identity("b"), 0, 0)
    assert a.session_id != b.session_id and a.key != b.key
    assert a.digest == b.digest
    assert kept.attach(worker_identity("c", weights="other"), 0, 0).digest != a.digest


def test_sessions_beyond_the_limit_are_refused_until_one_ends() -> None:
    kept, clock, _ = sessions(limit=1)
    kept.attach(worker_identity("a"), 0, 0)
    with pytest.raises(Overloaded):
        kept.attach(worker_identity("b"), 0, 0)
    clock.now = 10.0
    kept.attach(worker_identity("b"), 0, 0)

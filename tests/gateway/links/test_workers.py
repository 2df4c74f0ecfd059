from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.links.workers import Worker, WorkerDirectory
from gateway.requests import ModelLimits
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import WorkerTarget
from mesh.domain.workers import WorkerRole
from tests.support.scheduling import NAMESPACE

MODEL_SECONDS = 5.0


OTHER = msgspec.structs.replace(NAMESPACE, dtype="float8_e4m3fn")


def make_worker(name: str = "a", incarnation: str = "1", **changes: Any) -> Worker:
    fields: dict[str, Any] = {
        "target": WorkerTarget(name, incarnation, f"{name}:1"),
        "role": WorkerRole.DECODE,
        "model": "m",
        "kv_namespace": NAMESPACE,
        "can_prefill": True,
        "serving": True,
        "context_tokens": 100,
        "vocabulary_size": 50,
        "max_requests": 10,
        "requests": 0,
    }
    return Worker(**(fields | changes))


def make_prefill(name: str, **changes: Any) -> Worker:
    return make_worker(name, role=WorkerRole.PREFILL, **changes)


def least_loaded(
    directory: WorkerDirectory, avoid: Sequence[str] = (), live: dict[str, int] | None = None
) -> tuple[str, str | None] | None:
    """Ids of the chosen workers of model "m"."""
    found = directory.least_loaded("m", avoid, live or {})
    if found is None:
        return None
    decode, prefill = found
    return decode.worker_id, prefill.worker_id if prefill else None


def watched(*workers: Worker, at: float = 0.0, lease: float = 10.0) -> WorkerDirectory:
    directory = WorkerDirectory(MODEL_SECONDS)
    directory.begin_watch(at)
    directory.update(workers, lease, at)
    return directory


def test_a_worker_that_a_watch_no_longer_lists_is_gone() -> None:
    directory = watched(make_worker("a"), make_worker("b"))
    directory.update([make_worker("b")], 10.0, 1.0)
    assert set(directory.incarnations()) == {"b"}


def test_a_restarted_worker_shows_its_new_incarnation() -> None:
    directory = watched(make_worker(incarnation="1"))
    directory.update([make_worker(incarnation="2")], 10.0, 1.0)
    assert directory.incarnations() == {"a": "2"}


def test_a_new_scheduler_has_one_lease_to_learn() -> None:
    directory = watched(make_worker("a"))
    directory.end_watch(100.0)
    directory.begin_watch(101.0)
    directory.update([], 10.0, 101.0)
    assert set(directory.incarnations()) == {"a"}
    assert not directory.expire(110.9)
    assert directory.expire(111.0)
    assert directory.incarnations() == {}


def test_a_worker_that_appeared_in_the_new_watch_stays() -> None:
    directory = watched(make_worker("a"))
    directory.end_watch(100.0)
    directory.begin_watch(101.0)
    directory.update([], 10.0, 101.0)
    directory.update([make_worker("a")], 10.0, 105.0)
    assert not directory.expire(200.0)
    assert set(directory.incarnations()) == {"a"}


def test_a_snapshot_outlives_its_watch_by_one_lease() -> None:
    directory = watched(make_worker("a"))
    assert directory.valid(1e9)
    directory.end_watch(100.0)
    assert directory.valid(109.9)
    assert not directory.valid(110.0)


def test_nothing_is_valid_before_the_first_snapshot() -> None:
    assert not WorkerDirectory(MODEL_SECONDS).valid(0.0)


def test_the_worker_with_most_free_slots_is_chosen() -> None:
    busy, idle = make_worker("a", max_requests=10, requests=5), make_worker("b", max_requests=100, requests=20)
    assert least_loaded(watched(busy, idle)) == ("b", None)


def test_our_own_requests_count_where_the_snapshot_is_old() -> None:
    directory = watched(make_worker("a"), make_worker("b", requests=1))
    assert least_loaded(directory, live={"a": 5}) == ("b", None)


def test_draining_avoided_and_foreign_workers_are_not_chosen() -> None:
    directory = watched(make_worker("a", serving=False), make_worker("b"), make_worker("c", model="other"))
    assert least_loaded(directory, avoid=("b",)) is None


def test_a_prefill_worker_never_decodes() -> None:
    directory = watched(make_prefill("p"), make_worker("d", requests=9))
    assert least_loaded(directory) == ("d", None)
    assert least_loaded(directory, avoid=("d",)) is None
    assert directory.serving("m") == 1


def test_the_least_loaded_prefill_worker_is_chosen() -> None:
    decode = make_worker("d", can_prefill=False)
    directory = watched(decode, make_prefill("p0", requests=3), make_prefill("p1", requests=2))
    assert least_loaded(directory) == ("d", "p1")
    assert least_loaded(directory, avoid=("p1",)) == ("d", "p0")


def test_a_decode_worker_without_a_prefill_worker_gives_way() -> None:
    alone, paired = (
        make_worker("d0", can_prefill=False),
        make_worker("d1", can_prefill=False, kv_namespace=OTHER, requests=5),
    )
    assert least_loaded(watched(alone, paired, make_prefill("p", kv_namespace=OTHER))) == ("d1", "p")
    assert least_loaded(watched(alone, make_prefill("p", kv_namespace=OTHER))) is None


def test_a_model_with_prefill_workers_alone_is_not_served() -> None:
    directory = watched(make_prefill("p"))
    assert not directory.any_serving
    assert directory.limits("m") is None


def test_limits_are_the_widest_of_a_models_workers() -> None:
    directory = watched(make_worker("a", context_tokens=100), make_worker("b", context_tokens=200, vocabulary_size=40))
    directory.update([], 10.0, 1.0)
    assert directory.limits("m") == ModelLimits(200, 50)
    assert directory.limits("other") is None
    directory.expire(5.9)
    assert directory.limits("m") == ModelLimits(200, 50)
    directory.expire(6.0)
    assert (directory.limits("m"), directory.models()) == (None, [])


def test_a_model_that_is_served_again_in_time_stays() -> None:
    directory = watched(make_worker("a"))
    directory.update([], 10.0, 1.0)
    directory.update([make_worker("a", incarnation="2")], 10.0, 5.0)
    directory.expire(100.0)
    assert directory.models() == ["m"]
    directory.update([], 10.0, 101.0)
    directory.expire(105.9)
    assert directory.models() == ["m"]


def test_a_model_leaves_with_its_last_decode_worker() -> None:
    directory = watched(make_worker("a"), make_prefill("p"))
    directory.update([make_prefill("p")], 10.0, 1.0)
    directory.expire(6.0)
    assert directory.models() == []


def test_a_worker_with_another_model_ends_its_old_one() -> None:
    directory = watched(make_worker("a", model="old"))
    directory.update([make_worker("a", model="new")], 10.0, 1.0)
    assert directory.models() == ["new", "old"]
    directory.expire(6.0)
    assert directory.models() == ["new"]


def test_models_stay_while_there_is_no_scheduler() -> None:
    directory = watched(make_worker("a"))
    directory.end_watch(1.0)
    directory.expire(1000.0)
    assert directory.models() == ["m"]


def test_models_of_unlisted_workers_leave_after_their_lease() -> None:
    directory = watched(make_worker("a"))
    directory.end_watch(100.0)
    directory.begin_watch(101.0)
    directory.update([], 10.0, 101.0)
    assert directory.expire(111.0)
    assert directory.models() == ["m"]
    directory.expire(116.0)
    assert directory.models() == []


def test_only_serving_workers_count_as_serving() -> None:
    directory = watched(make_worker("a", serving=False), make_worker("b"))
    assert directory.serving("m") == 1
    assert directory.any_serving
    directory.update([make_worker("a", serving=False)], 10.0, 1.0)
    assert not directory.any_serving


def test_without_a_scheduler_drafts_do_not_decide_pairs() -> None:
    drafting = msgspec.structs.replace(NAMESPACE, layers=NAMESPACE.layers + 1, draft_layers=1)
    decode = make_worker("d", can_prefill=False)
    assert least_loaded(watched(decode, make_prefill("p", kv_namespace=drafting))) == ("d", "p")
    decode = make_worker("d", can_prefill=False, kv_namespace=drafting)
    assert least_loaded(watched(decode, make_prefill("p"))) == ("d", "p")
    other = msgspec.structs.replace(NAMESPACE, layers=NAMESPACE.layers + 2)
    assert least_loaded(watched(decode, make_prefill("p", kv_namespace=other))) is None


def test_sparse_prefill_needs_workers_that_are_set_alike() -> None:
    sparse, other = SparsePrefill(16384, 0.95), SparsePrefill(16384, 0.9)
    for workers, offered in [
        ([make_worker("a")], None),
        ([make_worker("a", sparse_prefill=sparse), make_prefill("p", sparse_prefill=sparse)], sparse),
        ([make_worker("a", sparse_prefill=sparse), make_prefill("p")], None),
        ([make_worker("a", sparse_prefill=sparse), make_prefill("p", sparse_prefill=other)], None),
        ([make_worker("a", can_prefill=False), make_prefill("p", sparse_prefill=sparse)], sparse),
        ([make_worker("a", sparse_prefill=sparse), make_worker("b", model="n")], sparse),
    ]:
        assert watched(*workers).sparse_prefill("m") == offered
    assert watched(make_worker("a", sparse_prefill=sparse)).sparse_prefill("unknown") is None


def test_what_is_offered_is_known_while_workers_are_started_again() -> None:
    sparse = SparsePrefill(16384, 0.95)
    directory = watched(make_worker("a", can_prefill=False), make_prefill("p", sparse_prefill=sparse))
    directory.update([make_worker("a", can_prefill=False)], 10.0, 1.0)
    assert directory.sparse_prefill("m") == sparse
    directory.update([], 10.0, 2.0)
    assert directory.sparse_prefill("m") == sparse
    directory.update([make_worker("a")], 10.0, 3.0)
    assert directory.sparse_prefill("m") is None

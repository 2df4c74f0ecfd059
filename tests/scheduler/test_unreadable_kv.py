"""What the log says of prefill workers whose KV no decode worker can read."""

from collections.abc import Callable

import msgspec
import pytest

from mesh.domain.workers import WorkerRole, unreadable_kv
from scheduler.registry import Registry
from scheduler.unreadable_kv import UnreadableKv
from tests.support.registries import LEASE, make_registry
from tests.support.scheduling import NAMESPACE, ManualClock, make_identity

PREFILL = make_identity("prefill-0", role=WorkerRole.PREFILL)
FP8 = msgspec.structs.replace(NAMESPACE, dtype="float8_e4m3fn")
OTHER = make_identity("decode-0", kv_namespace=FP8)
READER = make_identity("decode-1")


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, str]]]:
    """The fields of all such warnings so far."""

    def read() -> list[dict[str, str]]:
        return [vars(record)["fields"] for record in caplog.records if record.name == "scheduler.unreadable_kv"]

    return read


def pass_a_lease(registry: Registry, clock: ManualClock, watch: UnreadableKv) -> None:
    """Every worker stays."""
    for _ in range(4):
        watch.look()
        clock.now += LEASE / 4
        for worker in registry.workers():
            registry.attach(worker.identity)
    watch.look()


def test_a_prefill_worker_that_nobody_reads_is_told_of_once(warned: Callable[[], list[dict[str, str]]]) -> None:
    registry, clock = make_registry()
    watch = UnreadableKv(registry)
    registry.attach(PREFILL)
    registry.attach(OTHER)
    watch.look()
    assert warned() == []
    pass_a_lease(registry, clock, watch)
    assert warned() == [{"id": "prefill-0", "why": "dtype oracle against float8_e4m3fn"}]
    pass_a_lease(registry, clock, watch)
    assert len(warned()) == 1


def test_a_reader_that_comes_within_a_lease_is_soon_enough(warned: Callable[[], list[dict[str, str]]]) -> None:
    registry, clock = make_registry()
    watch = UnreadableKv(registry)
    registry.attach(PREFILL)
    registry.attach(OTHER)
    watch.look()
    clock.now += LEASE / 2
    registry.attach(READER)
    pass_a_lease(registry, clock, watch)
    assert warned() == []


def test_the_end_of_the_last_reader_is_told_of(warned: Callable[[], list[dict[str, str]]]) -> None:
    registry, clock = make_registry()
    watch = UnreadableKv(registry)
    registry.attach(PREFILL)
    registry.attach(OTHER)
    for told in (1, 2):
        registry.attach(READER)
        pass_a_lease(registry, clock, watch)
        assert len(warned()) == told - 1
        registry.leave(registry.attach(READER))
        pass_a_lease(registry, clock, watch)
        assert len(warned()) == told


def test_kv_that_the_models_decode_workers_refuse_is_unreadable() -> None:
    drafts = msgspec.structs.replace(NAMESPACE, layers=2, draft_layers=1)
    assert unreadable_kv([PREFILL]) == {}
    assert unreadable_kv([PREFILL, READER, OTHER]) == {}
    assert unreadable_kv([PREFILL, make_identity("decode-2", kv_namespace=drafts)]) == {}
    assert unreadable_kv([PREFILL, make_identity("decode-2", model="another", kv_namespace=FP8)]) == {}
    assert unreadable_kv([PREFILL, make_identity("decode-2", receives_kv=False)]) == {"prefill-0": "they receive no KV"}

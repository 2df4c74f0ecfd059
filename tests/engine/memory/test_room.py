"""The host memory that a rank takes for blocks that its pool evicts."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from engine.config import EngineConfig
from engine.memory import room
from engine.memory.room import host_slots
from engine.moves.host_slots import HostSlots
from mesh.errors import EngineFailed
from mesh.memory.machine_memory import MachineMemory
from tests.support.engines import oracle_config

AVAILABLE_BLOCKS, BLOCK_BYTES = 4000, 1 << 20


@pytest.fixture(autouse=True)
def _memory_for_4000_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "machine_memory", lambda: MachineMemory(AVAILABLE_BLOCKS * BLOCK_BYTES, None))


def taken(
    config: EngineConfig, device: Literal["cpu", "cuda", "oracle"], make: Callable[[int], HostSlots] | None = None
) -> int | None:
    """How many blocks are made; None if none are."""
    asked: list[int] = []

    def note(count: int) -> Any:
        asked.append(count)
        return SimpleNamespace(count=count)

    assert (host_slots(config, device, BLOCK_BYTES, make or note) is not None) == bool(asked)
    return asked[0] if asked else None


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {}, 400),
        ("cpu", {"parallel": {"dp": 2}}, 200),
        ("cpu", {"prefix_cache": False}, None),
        ("cuda", {}, 400),
        ("cuda", {"parallel": {"tp": 4, "dp": 2}}, 200),
        ("cuda", {"parallel": {"dp": 8, "hosts": 2}}, 100),
        ("cuda", {"prefix_cache": False}, None),
        ("oracle", {}, None),
        ("cuda", {"host_blocks": 4000}, 4000),
        ("oracle", {"host_blocks": 7}, 7),
        ("cpu", {"host_blocks": 0}, None),
    ],
)
def test_auto_is_a_share_and_numbers_are_kept(
    device: Literal["cpu", "cuda", "oracle"], settings: dict[str, Any], expected: int | None
) -> None:
    assert taken(oracle_config(**settings), device) == expected


def _lacks_memory(count: int) -> HostSlots:
    raise MemoryError


def _cannot_lock(count: int) -> HostSlots:
    raise EngineFailed("CUDA cannot page-lock 4.2 GB of host memory")


@pytest.mark.parametrize(
    ("blocks", "make", "why"),
    [
        (4001, None, "4.2 GB are available"),
        (4000, _lacks_memory, "the system grants no such memory"),
        (4000, _cannot_lock, "CUDA cannot page-lock"),
    ],
)
def test_memory_that_cannot_be_had_is_warned_of(
    blocks: int, make: Callable[[int], HostSlots] | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "deepmesh.engine"):
        assert taken(oracle_config(host_blocks=blocks), "cuda", make) is None
    (record,) = caplog.records
    assert "lower engine.host_blocks" in record.message
    assert why in record.fields["why"]  # type: ignore[attr-defined]


def test_no_more_is_taken_than_the_container_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MachineMemory(AVAILABLE_BLOCKS * BLOCK_BYTES, AVAILABLE_BLOCKS // 4 * BLOCK_BYTES)
    monkeypatch.setattr(room, "machine_memory", lambda: memory)
    assert taken(oracle_config(), "cuda") == 100
    assert host_slots(oracle_config(host_blocks=2000), "cuda", BLOCK_BYTES, _cannot_lock) is None


def test_a_start_says_how_many_blocks_it_keeps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deepmesh.engine"):
        taken(oracle_config(), "cuda")
    (record,) = caplog.records
    assert record.fields == {"blocks": 400, "size": "0.4 GB"}  # type: ignore[attr-defined]

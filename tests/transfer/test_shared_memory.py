"""Memory of one process, mapped by another."""

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer.shared_memory import MemoryHandle, SharedMemory, map_memory

SIZE = 3 * 4096 + 5


def handle_of(memory: SharedMemory) -> MemoryHandle:
    assert memory.handle is not None
    return memory.handle


def answer(pipe: Connection, handle: MemoryHandle) -> None:
    """In another process: say what lies at each place asked for."""
    mapped = map_memory(handle)
    while (place := pipe.recv()) is not None:
        pipe.send(int(mapped[place]))


def test_another_process_reads_what_the_owner_writes() -> None:
    memory = SharedMemory(SIZE)
    memory.array[7] = 1
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs, handle_of(memory)))
    process.start()
    try:
        for place, value in ((7, 1), (SIZE - 1, 0)):
            ours.send(place)
            assert ours.recv() == value
        memory.array[SIZE - 1] = 9
        ours.send(SIZE - 1)
        assert ours.recv() == 9
    finally:
        ours.send(None)
        process.join()


@pytest.mark.parametrize("writable", [False, True])
def test_what_is_mapped_cannot_be_written(writable: bool) -> None:
    memory = SharedMemory(SIZE)
    mapped = map_memory(handle_of(memory), writable=writable)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"host": "another"}, "another host"),
        ({"name": "deepmesh-kv-another"}, "PID namespaces differ"),
        ({"size_bytes": SIZE - 1}, "another size"),
        ({"descriptor": 1 << 20}, "No such file"),
    ],
)
def test_a_handle_that_means_something_else_here_is_refused(changed: dict[str, Any], message: str) -> None:
    memory = SharedMemory(SIZE)
    with pytest.raises(OSError, match=message):
        map_memory(msgspec.structs.replace(handle_of(memory), **changed))


@pytest.mark.parametrize(("size", "message"), [(SIZE, "shrink"), (0, "empty")])
def test_memory_that_its_owner_made_otherwise_is_refused(size: int, message: str) -> None:
    file = os.memfd_create("deepmesh-kv-own", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        handle = handle_of(SharedMemory(SIZE))
        handle = msgspec.structs.replace(handle, descriptor=file, name="deepmesh-kv-own", size_bytes=size)
        with pytest.raises(OSError, match=message):
            map_memory(handle)
    finally:
        os.close(file)


def test_it_lives_as_long_as_somebody_maps_it() -> None:
    memory = SharedMemory(SIZE)
    handle, mapped = handle_of(memory), map_memory(handle_of(memory))
    memory.array[3] = 5
    del memory
    gc.collect()
    assert mapped[3] == 5
    with pytest.raises(FileNotFoundError):
        map_memory(handle)


def test_nobody_can_shrink_it() -> None:
    memory = SharedMemory(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(handle_of(memory).descriptor, 0)
    assert not np.any(memory.array)

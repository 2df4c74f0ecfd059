"""KV on a GPU and the same KV in host memory: each verifies what the other sends."""

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.runner.device_memory import DeviceMemory, DeviceSlot, HostSide
from transfer.host_memory import HostMemory
from transfer.memory import Check, KeyedPieces, tags_in
from transfer.segments import Tile
from transfer.shared_memory import SharedMemory, map_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _on_the_same_stream_as_before_afterwards() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def random_pool() -> torch.Tensor:
    return torch.randint(256, (3, 9, 64, 576), dtype=torch.uint8)


def device_memory(pool: torch.Tensor) -> DeviceMemory:
    """The pool's memory. Its stream is this thread's from now on."""
    torch.cuda.synchronize()
    memory = DeviceMemory(pool)
    memory.enter_thread()
    return memory


SIDES = pytest.mark.parametrize("on_host", [False, True], ids=["slot", "host side"])


@pytest.mark.parametrize(("first_layer", "layers", "blocks"), [(0, 3, [4, 0, 8]), (2, 1, [1])])
@SIDES
def test_staged_bytes_and_checksums_are_those_of_host_memory(
    on_host: bool, first_layer: int, layers: int, blocks: list[int]
) -> None:
    pool = random_pool()
    host, device = HostMemory(pool.flatten(2).numpy()), device_memory(pool.cuda())
    size = layers * len(blocks) * device.piece_bytes
    packed, slot = host.allocate_staging(size), device.allocate_staging(size + 100)
    staging = device.host_side(slot) if on_host else slot
    expected = host.gather(first_layer, layers, blocks, packed, KEY).result()
    assert device.gather(first_layer, layers, blocks, staging, KEY).result() == expected
    assert np.array_equal(slot.tensor[:size].cpu().numpy(), packed)
    if isinstance(staging, HostSide):
        assert np.array_equal(staging[:size], packed)
    tile = Tile(first_layer, layers, 0, len(blocks))
    keyed = [KeyedPieces(block, 2, 1, bytes([block]) * 32) for block in range(len(blocks))]
    assert device.tags(staging, tile, keyed) == host.tags(packed, tile, keyed)


@pytest.mark.parametrize("flipped", [False, True])
@SIDES
def test_only_pieces_as_announced_land_where_they_belong(on_host: bool, flipped: bool) -> None:
    pool, before = random_pool().cuda(), random_pool()
    target = before.cuda()
    sender = device_memory(pool)
    staging = sender.allocate_staging(2 * 2 * sender.piece_bytes)
    checksum = sender.gather(1, 2, [7, 3], staging, KEY).result()
    receiver = device_memory(target)
    slot = receiver.allocate_staging(2 * 2 * sender.piece_bytes)
    sent = staging.tensor.cpu().numpy()
    sent[1000] ^= flipped
    received: DeviceSlot | HostSide = slot
    if on_host:
        received = receiver.host_side(slot)
        received[: len(sent)][:] = sent
    else:
        slot.tensor.copy_(torch.from_numpy(sent))
    receiver.received(received, len(sent))
    assert receiver.land(1, 2, [0, 5], received, KEY, checksum).result() is not flipped
    if not flipped:
        before[1:3, [0, 5]] = pool.cpu()[1:3, [7, 3]]
    assert torch.equal(target.cpu(), before)


@pytest.mark.parametrize("most_pitch", [1, (1 << 31) - 1], ids=["layer by layer", "in rows"])
@pytest.mark.parametrize("checked", [False, True])
def test_blocks_that_another_process_shares_are_copied(
    checked: bool, most_pitch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of regions that are locked one by one."""
    monkeypatch.setattr("engine.runner.device_source.REGION_BYTES", 4096)
    monkeypatch.setattr("engine.runner.device_source.MOST_PITCH", most_pitch)
    planes = [random_pool(), random_pool()[..., :128].contiguous()]
    before = [plane.clone() for plane in planes]
    targets = [plane.cuda() for plane in planes]
    torch.cuda.synchronize()
    memory = DeviceMemory(*targets)
    memory.enter_thread()
    shared = SharedMemory(7 * 4 * memory.piece_bytes)
    shared.array[:] = np.random.default_rng(0).integers(0, 256, len(shared.array), np.uint8)
    assert shared.handle is not None
    mapped = map_memory(shared.handle, writable=True).reshape(7, 4, memory.piece_bytes)
    tile, sources = Tile(1, 2, 0, 3), [6, 0, 3]
    keyed = [KeyedPieces(block, 1, 2, bytes([block]) * 32) for block in range(3)]
    expected_tags = tags_in([mapped[source, layer].data for layer in (1, 2) for source in sources], tile, keyed)
    check = Check(keyed, lambda tags: None if tags == expected_tags else "wrong")
    copied = memory.host_source(mapped).copy(tile, sources, [8, 1, 4], check if checked else None)
    assert copied.result() is None and copied.completed
    found = torch.from_numpy(mapped[[6, 0, 3], 1:3].copy()).transpose(0, 1)
    for target, expected, pieces in zip(targets, before, found.split([64 * 576, 64 * 128], 2), strict=True):
        expected[1:3, [8, 1, 4]] = pieces.reshape(2, 3, 64, -1)
        assert torch.equal(target.cpu(), expected)


def test_memory_that_cannot_be_page_locked_is_an_error() -> None:
    memory = device_memory(random_pool().cuda())
    shared = SharedMemory(memory.piece_bytes)
    assert shared.handle is not None
    mapped = map_memory(shared.handle, writable=True).reshape(1, 1, memory.piece_bytes)
    first = memory.host_source(mapped)
    # It is locked already.
    with pytest.raises(OSError, match="cannot page-lock"):
        memory.host_source(mapped)
    del first
    memory.host_source(mapped)


def test_a_pool_is_freed_with_its_kv_memory() -> None:
    pool = random_pool().cuda()
    memory, gone = DeviceMemory(pool), weakref.ref(pool)
    staging = memory.allocate_staging(memory.piece_bytes)
    part = staging[:100]
    del memory, staging, pool
    gc.collect()
    # A transfer that still sends keeps only the allocation alive.
    assert gone() is None and torch.as_tensor(part, device="cuda").numel() == 100

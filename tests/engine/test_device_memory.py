"""KV of a GPU against the same KV in host memory: what one sends the other verifies."""

import numpy as np
import pytest
import torch

from engine.device_memory import DeviceMemory
from transfer.digest import segment_digest
from transfer.host_memory import HostMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KEY = bytes(range(32))


def random_pool() -> torch.Tensor:
    return torch.randint(256, (3, 9, 64, 576), dtype=torch.uint8)


@pytest.mark.parametrize(("first_layer", "layers", "blocks"), [(0, 3, [4, 0, 8]), (2, 1, [1])])
def test_staged_bytes_and_digests_are_those_of_host_memory(first_layer: int, layers: int, blocks: list[int]) -> None:
    pool = random_pool()
    host, device = HostMemory(pool.flatten(2).numpy()), DeviceMemory(pool.cuda())
    size = layers * len(blocks) * device.piece_bytes
    packed, staging = host.allocate_staging(size), device.allocate_staging(size + 100)
    expected = host.gather(first_layer, layers, blocks, packed, KEY).result()
    assert device.gather(first_layer, layers, blocks, staging, KEY).result() == expected
    assert np.array_equal(staging.tensor[:size].cpu().numpy(), packed)
    assert device.digest(staging, size - 7, KEY).result() == segment_digest(packed, size - 7, KEY)


def test_scattered_blocks_are_where_they_belong_and_nowhere_else() -> None:
    pool, before = random_pool().cuda(), random_pool()
    target = before.cuda()
    sender, receiver = DeviceMemory(pool), DeviceMemory(target)
    staging = sender.allocate_staging(2 * 2 * sender.piece_bytes)
    sender.gather(1, 2, [7, 3], staging, KEY).result()
    landed = receiver.allocate_staging(2 * 2 * sender.piece_bytes)
    landed.tensor.copy_(staging.tensor)
    torch.cuda.synchronize()
    receiver.scatter(landed, 1, 2, [0, 5]).result()
    before[1:3, [0, 5]] = pool.cpu()[1:3, [7, 3]]
    assert torch.equal(target.cpu(), before)

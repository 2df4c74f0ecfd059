"""The memory node of a GPU, by a driver that knows two."""

from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from engine.runner import device_node
from engine.runner.device_node import node_of_gpu
from mesh.memory.memory_node import node_of_device

ADDRESSES = [b"0000:1B:00.0\0", b"0001:C2:00.0\0"]


class FakeDriver:
    CUresult = cuda.CUresult

    def __init__(self, knows_addresses: bool) -> None:
        self._knows_addresses = knows_addresses

    def cuDeviceGet(self, index: int) -> Any:
        if index >= len(ADDRESSES):
            return self.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return self.CUresult.CUDA_SUCCESS, index

    def cuDeviceGetPCIBusId(self, length: int, gpu: int) -> Any:
        if not self._knows_addresses:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE, b""
        assert length == len(ADDRESSES[gpu])
        return self.CUresult.CUDA_SUCCESS, ADDRESSES[gpu]


@pytest.mark.parametrize(
    ("index", "knows_addresses", "expected"),
    [(0, True, 0), (1, True, 1), (2, True, None), (1, False, None)],
    ids=["first", "second", "no such GPU", "no address"],
)
def test_a_gpus_node_is_that_of_its_pci_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, knows_addresses: bool, expected: int | None
) -> None:
    for node, address in enumerate(["0000:1b:00.0", "0001:c2:00.0"]):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(device_node, "driver", FakeDriver(knows_addresses))
    monkeypatch.setattr(device_node, "node_of_device", lambda address: node_of_device(address, tmp_path))
    assert node_of_gpu(index) == expected

"""How kernels in CUDA C++ are launched, without a GPU."""

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from kernels.nvrtc import CudaKernel


class Arguments(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int),)


def test_a_launch_has_its_own_grid_stream_and_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, ...]] = []
    stream = 16

    def launch(config: Any, *_: object) -> tuple[int]:
        launched.append(
            (config.gridDimX, config.blockDimX, int(config.hStream), config.sharedMemBytes, config.numAttrs)
        )
        return (0,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream + device, raising=False)
    kernel = CudaKernel(driver.CUfunction(1), 100, 1)
    other = CudaKernel(driver.CUfunction(2), 200, 1)
    for _ in range(2):
        kernel.launch((3, 1, 1), 64, Arguments(1))
    kernel.launch((4, 1, 1), 64, Arguments(1), cluster=2, dependent=True)
    stream = 32
    kernel.launch((3, 1, 1), 64, Arguments(1), dependent=True)
    other.launch((3, 1, 1), 64, Arguments(1))
    assert launched == [
        (3, 64, 17, 100, 0),
        (3, 64, 17, 100, 0),
        (4, 64, 17, 100, 2),
        (3, 64, 33, 100, 1),
        (3, 64, 33, 200, 0),
    ]

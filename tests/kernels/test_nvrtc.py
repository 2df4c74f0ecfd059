"""How kernels in CUDA C++ are launched, without a GPU."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from kernels import nvrtc
from kernels.nvrtc import Compiled, CudaKernel, compile_ahead

WAIT_SECONDS = 20.0


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


class Compiler:
    """Compiles a source when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.lets = {"first": Event(), "second": Event()}
        monkeypatch.setattr(nvrtc, "compile_source", self._compile)
        monkeypatch.setattr(nvrtc, "_target", lambda device: "sm_90a")
        monkeypatch.setattr(driver, "cuModuleLoadData", lambda code: (0, code))
        for cached in (nvrtc._module, nvrtc._compiling):
            cached.cache_clear()

    def _compile(self, source: Path, target: str, macros: tuple[str, ...]) -> Compiled:
        self.begun.append(source.stem)
        assert self.lets[source.stem].wait(WAIT_SECONDS)
        if source.stem == "second":
            raise RuntimeError("second.cu does not compile")
        return Compiled(f"{source.stem} for {target}".encode(), "")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    yield Compiler(monkeypatch)
    for cached in (nvrtc._module, nvrtc._compiling):
        cached.cache_clear()


FIRST, SECOND = Path("first.cu"), Path("second.cu")


def test_sources_are_compiled_at_once_and_each_once(compiler: Compiler) -> None:
    compile_ahead([FIRST, SECOND], 0)
    # The second ends first.
    compiler.lets["second"].set()
    with pytest.raises(RuntimeError, match="does not compile"):
        nvrtc._module(SECOND, 0, ())
    compiler.lets["first"].set()
    assert nvrtc._module(FIRST, 0, ()) == b"first for sm_90a"
    assert sorted(compiler.begun) == ["first", "second"]


def test_a_source_that_was_not_begun_is_compiled_when_loaded(compiler: Compiler) -> None:
    compiler.lets["first"].set()
    assert nvrtc._module(FIRST, 0, ()) == b"first for sm_90a" and compiler.begun == ["first"]

"""How kernels in CUDA C++ are launched, and their machine code kept, without a GPU."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from kernels import nvrtc
from kernels.nvrtc import Compiled, CudaKernel, machine_code


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


SOURCE = Path("kernels/norm/cuda/clusters.cu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is compiled, each time to other code, and kept in an empty folder."""
    targets: list[str] = []

    def compile_source(source: Path, target: str) -> Compiled:
        targets.append(f"{source.stem} {target}")
        return Compiled(f"code {len(targets)}".encode(), "")

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "_version", lambda: "this")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return targets


def test_a_source_is_compiled_once_for_each_target(compiled: list[str]) -> None:
    codes = [machine_code(SOURCE, target) for target in ("sm_90a", "sm_90a", "sm_80", "sm_90a")]
    assert codes == [b"code 1", b"code 1", b"code 2", b"code 1"]
    assert compiled == ["clusters sm_90a", "clusters sm_80"]


def test_code_of_another_version_is_compiled_again(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine_code(SOURCE, "sm_90a")
    monkeypatch.setattr(nvrtc, "_version", lambda: "next")
    assert machine_code(SOURCE, "sm_90a") == b"code 2"


@pytest.mark.parametrize("damage", [b"", b"code 1", bytes(40)], ids=["empty", "unsealed", "zeros"])
def test_damaged_code_is_compiled_again(compiled: list[str], tmp_path: Path, damage: bytes) -> None:
    machine_code(SOURCE, "sm_90a")
    (kept,) = (tmp_path / "cache/deepmesh/cuda").iterdir()
    kept.write_bytes(damage)
    assert [machine_code(SOURCE, "sm_90a") for _ in range(2)] == [b"code 2", b"code 2"]


def test_code_is_compiled_where_nothing_can_be_kept(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert [machine_code(SOURCE, "sm_90a") for _ in range(2)] == [b"code 1", b"code 2"]


def test_changed_sources_are_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", lambda: (0, 13, 0))
    monkeypatch.setattr(nvrtc, "__file__", str(tmp_path / "nvrtc.py"))
    (tmp_path / "nvrtc.py").touch()
    header = tmp_path / "norm/cuda/sums.cuh"
    header.parent.mkdir(parents=True)
    versions = []
    for text in ("one", "two", "one"):
        header.write_text(text)
        versions.append(nvrtc._version.__wrapped__())
    assert versions[0] == versions[2] != versions[1]

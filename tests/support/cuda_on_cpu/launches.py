"""Stands in for the driver: modules of `kernels` launch their CUDA sources on the CPU, on tensors that lie there."""

import ctypes
import sys
from functools import cached_property
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.cuda_on_cpu.building import build

# Multiprocessors of the GPU that adapters believe to have: few, so that blocks have several turns.
PROCESSORS = 3


class CpuKernel:
    """As `kernels.nvrtc.CudaKernel`. A launch ends before it returns."""

    def __init__(self, library: ctypes.CDLL, name: str, seeds: "count[int]") -> None:
        self._launch = getattr(library, f"launch_{name}")
        self._launch.restype = ctypes.c_char_p
        self._shared_bytes = _shared_bytes(library, name)
        self._seeds = seeds

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: ctypes.Structure,
        *,
        cluster: int = 1,
        dependent: bool = False,
        shared_bytes: int | None = None,
    ) -> None:
        """Raises AssertionError if threads wait forever or misuse a barrier, a copy or shared memory."""
        del dependent
        where, seed = (ctypes.c_uint * 3)(*grid), next(self._seeds)
        shared_bytes = self._shared_bytes if shared_bytes is None else shared_bytes
        failure = self._launch(ctypes.byref(arguments), where, cluster, threads, shared_bytes, seed)
        assert not failure, failure.decode()


def _shared_bytes(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.c_int.in_dll(library, f"{name}_shared_bytes").value
    except ValueError:
        return 0


class CudaOnCpu:
    """Loads modules of `kernels` that launch on the CPU until the test ends.

    Warps, copies and products take their turns in another order in each launch, and in the same at each run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        """folder: where compiled sources are kept."""
        self._monkeypatch, self._folder = monkeypatch, folder
        self._seeds = count(1)
        self._libraries: dict[tuple[Path, tuple[str, ...], str | None], ctypes.CDLL] = {}
        # By source.
        self._mistakes: dict[Path, dict[str, str]] = {}

    def module(self, name: str) -> ModuleType:
        """`kernels.NAME`."""
        module = import_module(f"kernels.{name}")
        for other in [each for path, each in sys.modules.items() if path.startswith("kernels.")]:
            for function, own in self._functions.items():
                if hasattr(other, function):
                    self._monkeypatch.setattr(other, function, own)
        return module

    def make_mistake(self, source: Path, right: str, wrong: str) -> None:
        """Compile the source with another text instead of this, which it or its headers must have once."""
        self._mistakes.setdefault(source, {})[right] = wrong

    def load_kernel(self, source: Path, name: str, _device: int = 0, macros: tuple[str, ...] = ()) -> CpuKernel:
        mistakes = self._mistakes.get(source, {})
        # Other tests do not need a wrong source: of its kernels only the one that is launched is compiled.
        only = name if mistakes else None
        library = self._libraries.get((source, macros, only))
        if library is None:
            library = build(source, self._folder, mistakes, macros, only)
            self._libraries[source, macros, only] = library
        return CpuKernel(library, name, self._seeds)

    @cached_property
    def _functions(self) -> dict[str, object]:
        return {
            "load_kernel": self.load_kernel,
            "encode_rows": encode_rows,
            "encode_halves": encode_halves,
            "is_hopper": lambda *_: True,
            "processors": lambda *_: PROCESSORS,
            "spared": lambda *_: 0,
        }


def encode_rows(
    address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int
) -> ctypes.Array[ctypes.c_uint64]:
    """As `kernels.nvrtc.encode_rows`: the fields of `Boxes` in copies.h."""
    return (ctypes.c_uint64 * 16)(address, rows, row_bytes, box_rows, box_bytes)


def encode_halves(address: int, matrices: int, rows: int, row_bytes: int) -> ctypes.Array[ctypes.c_uint64]:
    """As `kernels.nvrtc.encode_halves`: the same fields, as `copy_halves` in copies.h reads them."""
    return (ctypes.c_uint64 * 16)(address, rows, row_bytes, matrices, 128)

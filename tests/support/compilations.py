"""What is compiled for a GPU while a test runs."""

import sys
from importlib import import_module
from typing import Any

import pytest

from kernels.fp8_gemm import deep_gemm

PRODUCTS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "fp8_m_grouped_gemm_nt_masked")


def watch_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list into which goes what is compiled until the test ends, as in a process that has compiled nothing yet.

    Triton's kernels too that it finds on disk. deep_gemm compiles where it sees fit, by the shapes of a product alone:
    each that it was not asked for before counts.
    """
    found: list[str] = []
    _watch_triton(monkeypatch, found)
    _watch_nvrtc(monkeypatch, found)
    if deep_gemm.available():
        _watch_products(monkeypatch, found)
    return found


def _watch_triton(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    knobs, functions = import_module("triton.knobs"), import_module("triton.runtime.jit")
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for value in vars(module).values():
                if isinstance(value, functions.JITFunction):
                    value.device_caches.clear()

    def compiled(*, repr: str, **_: Any) -> None:
        found.append(repr)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)


def _watch_nvrtc(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    nvrtc = import_module("kernels.nvrtc")
    for cached in (nvrtc.load_kernel, nvrtc._module):
        cached.cache_clear()
    compile_source = nvrtc.compile_source

    def compiled(source: Any, target: str) -> bytes:
        found.append(source.name)
        code: bytes = compile_source(source, target)
        return code

    monkeypatch.setattr(nvrtc, "compile_source", compiled)


def _watch_products(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    package, known = import_module(deep_gemm.PACKAGE), set[str]()

    def watched(name: str) -> Any:
        product = getattr(package, name)

        def multiply(left: Any, right: Any, *rest: Any) -> Any:
            numbers = [value for value in rest if isinstance(value, int)]
            shape = f"{name}: {tuple(left[0].shape)} times {tuple(right[0].shape)} {numbers}"
            if shape not in known:
                known.add(shape)
                found.append(shape)
            return product(left, right, *rest)

        return multiply

    for name in PRODUCTS:
        monkeypatch.setattr(package, name, watched(name))

"""Watches what is compiled for a GPU while a test runs."""

import sys
from importlib import import_module
from typing import Any

import pytest


def watch_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the name of everything that is compiled until the test ends, as in a process that has compiled
    nothing yet.

    It also gets Triton's kernels that are found on disk, but not what packages compile by themselves.
    """
    found: list[str] = []
    _watch_triton(monkeypatch, found)
    _watch_nvrtc(monkeypatch, found)
    return found


def _watch_triton(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    knobs, functions = import_module("triton.knobs"), import_module("triton.runtime.jit")
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for value in vars(module).values():
                if isinstance(value, functions.JITFunction):
                    value.device_caches.clear()
    import_module("kernels.dependent_launch").compiled_kernel.cache_clear()

    def compiled(*, repr: str, **_: Any) -> None:
        found.append(repr)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)


def _watch_nvrtc(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    nvrtc = import_module("kernels.nvrtc")
    for cached in (nvrtc.load_kernel, nvrtc._module, nvrtc._compiling):
        cached.cache_clear()
    compile_source = nvrtc.compile_source

    def compiled(source: Any, target: str, macros: tuple[str, ...]) -> Any:
        found.append(source.name)
        return compile_source(source, target, macros)

    monkeypatch.setattr(nvrtc, "compile_source", compiled)

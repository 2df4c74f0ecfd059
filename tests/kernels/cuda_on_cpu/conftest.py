"""CUDA sources run on the CPU, through the modules that launch them. See tests/support/cuda_on_cpu."""

from pathlib import Path

import pytest

from tests.support.cuda_on_cpu.building import COMPILER
from tests.support.cuda_on_cpu.launches import CudaOnCpu


@pytest.fixture(scope="module")
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled sources are kept: in pytest's cache, which all processes of a run and later runs share.

    Of a module's tests, which mostly run the same sources, one process runs all: two would compile a source at once.
    """
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("cuda_on_cpu") if cache is None else cache.mkdir("cuda_on_cpu")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> CudaOnCpu:
    pytest.importorskip("cuda.bindings")
    if COMPILER is None:
        pytest.skip("needs g++")
    return CudaOnCpu(monkeypatch, libraries)

"""Triton kernels run on the GPU if there is one, and in Triton's interpreter elsewhere."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.support.triton_interpreter import correct_interpreter

ON_GPU = torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where there is no GPU, collect one case of each test that needs one: it is skipped, as 1,600 more would be."""
    test = metafunc.definition
    if not ON_GPU and test.get_closest_marker("gpu") is not None:
        test.own_markers = [_first_case(mark) if mark.name == "parametrize" else mark for mark in test.own_markers]


def _first_case(mark: pytest.Mark) -> pytest.Mark:
    names, values = mark.args
    return pytest.mark.parametrize(names, list(values)[:1], **{**mark.kwargs, "ids": None}).mark


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new tensors with NaN, or the largest integer, so that output which a kernel does not write shows."""
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct the errors of Triton's interpreter."""
    if not ON_GPU and find_spec("triton"):
        correct_interpreter(monkeypatch)

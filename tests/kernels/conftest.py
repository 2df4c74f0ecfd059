"""Triton kernels run on the GPU if there is one, and in Triton's interpreter elsewhere."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.support.triton_interpreter import correct_interpreter

ON_GPU = torch.cuda.is_available()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new tensors with NaN, or the largest integer, so that output which a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct the errors of Triton's interpreter."""
    if not ON_GPU and find_spec("triton"):
        correct_interpreter(monkeypatch)

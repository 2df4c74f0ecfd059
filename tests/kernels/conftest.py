"""Triton kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

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
    """New tensors are full of NaN, or of the largest whole number: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, with what it gets wrong put right."""
    if not ON_GPU and find_spec("triton"):
        correct_interpreter(monkeypatch)

"""Triton kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

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
def interpreter_loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loop bounds in the interpreter are arrays of one element, which numpy 2.4 no longer takes for a whole number."""
    if not ON_GPU and find_spec("triton"):
        interpreter = import_module("triton.runtime.interpreter")
        patch_tensor = interpreter._patch_lang_tensor

        def patch(tensor: type, scope: SimpleNamespace) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    yield

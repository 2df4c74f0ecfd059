"""Corrects Triton's interpreter, which rounds, multiplies and counts differently than a GPU, and makes it faster."""

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
# numpy has no bfloat16 and no floats of one byte: their bits are held in these types.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def correct_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct the interpreter until the test ends."""
    interpreter = import_module("triton.runtime.interpreter")
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    whole_language = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    # The patches for the running kernel, if one runs.
    patches: list[Any] = []

    def patch_once(_function: object) -> Any:
        # The original patches the language again for each function that a kernel calls, which takes a third of the
        # time.
        if patches and patches[0]._changes:
            return interpreter._LangPatchScope()
        patches[:] = [patch_language(whole_language)]
        return patches[0]

    def with_index(tensor: type, scope: SimpleNamespace) -> None:
        patch_tensor(tensor, scope)
        # Loop bounds are arrays of one element, which numpy 2.4 no longer converts to an integer.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(_builder: object, a: Any, b: Any, d: Any, _precision: object, _imprecise: object) -> Any:
        # The original multiplies the bits of bfloat16 rather than their values.
        product = _values(a.data, a.dtype).float() @ _values(b.data, b.dtype).float()
        return interpreter.TensorHandle(d.data + product.numpy().astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    monkeypatch.setattr(interpreter, "_convert_float", _convert_float)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    # Otherwise each sum and product is computed with 64 bits too, for an assertion that only debugging turns on.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    _keep_types(interpreter, monkeypatch)


def _keep_types(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each type and shape once, where the original makes them again for each operation."""
    block_type, make_tensor = interpreter.tl.block_type, interpreter.tl.tensor.__init__
    numpy_scalar = cache(interpreter._get_np_dtype)
    # By names, which tell types apart.
    blocks: dict[tuple[str, str], Any] = {}
    shapes: dict[str, tuple[Any, Any]] = {}

    def numpy_dtype(kind: Any) -> np.dtype:
        return np.dtype(np.uint64) if kind.scalar.is_ptr() else numpy_scalar(kind.scalar)

    def with_element(self: Any, kind: Any) -> Any:
        names = self.name, kind.name
        if names not in blocks:
            blocks[names] = block_type(kind, self.shape)
        return blocks[names]

    def tensor_of(self: Any, handle: object, kind: Any) -> None:
        if kind.name in shapes:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.numel, self.shape = shapes[kind.name]
        else:
            make_tensor(self, handle, kind)
            shapes[kind.name] = self.numel, self.shape

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    monkeypatch.setattr(block_type, "to_ir", lambda self, builder: self)
    monkeypatch.setattr(block_type, "with_element_ty", with_element)
    monkeypatch.setattr(interpreter.tl.tensor, "__init__", tensor_of)


def _convert_float(data: np.ndarray, source: Any, target: Any, _rounding: object) -> np.ndarray:
    """Round to the nearest value; returns its bits. The original truncates, and loses carries into the exponent."""
    converted = _values(data, source).to(_DTYPES[target.name])
    return converted.view(getattr(torch, f"uint{8 * converted.element_size()}")).numpy()


def _values(data: np.ndarray, dtype: Any) -> torch.Tensor:
    torch_dtype = _DTYPES[dtype.scalar.name]
    bits = np.ascontiguousarray(data).view(_BITS[torch_dtype.itemsize])
    return torch.from_numpy(bits.copy()).view(torch_dtype).reshape(data.shape)

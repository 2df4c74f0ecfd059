"""Files of tensors as the safetensors package reads them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tools.tensor_file import write_tensors


def test_the_package_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {
        "b.float32": torch.randn(3, 5),
        "a.bfloat16": torch.randn(7).bfloat16(),
        "one byte": torch.randint(-128, 127, (5, 3), dtype=torch.int8),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "number": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
    }
    path = tmp_path / "file.safetensors"
    write_tensors(path, tensors, {"said by": "üs"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.float()), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"said by": "üs"}


def test_a_disk_that_takes_no_more_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_tensors(Path("/dev/full"), {"weight": torch.zeros(10)}, {})

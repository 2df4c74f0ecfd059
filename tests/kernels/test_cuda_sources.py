"""The CUDA sources compile for Hopper as they are meant to: seen by nvcc, which needs no device."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels import __file__ as package

SOURCES = sorted(Path(package).parent.glob("*/cuda/*.cu"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.parts[-3]}-{source.stem}")
def test_a_source_compiles_with_its_products_in_flight(source: Path, tmp_path: Path) -> None:
    target = "-gencode=arch=compute_90a,code=sm_90a"
    command = ["nvcc", "-cubin", "-std=c++17", target, "-Xptxas", "-v", "-o", str(tmp_path / "out.cubin"), str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    # What ptxas says where it waits after every product.
    assert "serialized" not in compiled.stderr

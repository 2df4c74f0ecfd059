"""On a CPU neither CUDA's bindings nor Triton need to be installed."""

import subprocess
import sys

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder


class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "triton"):
            raise ModuleNotFoundError(name)
        return None


sys.meta_path.insert(0, Absent())
import torch

import engine.rank.__main__
from kernels.act_quant import quantize
from kernels.fp8_gemm import block_scaled, fp8_gemm, make_workspace
from kernels.mla_projections import absorb_query
from kernels.norm import add_rms_norm

rows = torch.ones(2, 128)
print(add_rms_norm(rows, rows.clone(), torch.ones(128), 1e-6)[0, 0].item())
weight = block_scaled(torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))
print(fp8_gemm(quantize(rows.bfloat16()), weight, make_workspace(rows.device))[0, 0].item())
print(absorb_query(torch.ones(1, 1, 6), torch.ones(1, 4, 8), torch.ones(1, 1, dtype=torch.complex64))[0, 0, 0].item())
"""


def test_every_operation_computes_on_a_cpu() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    norm, product, absorbed = (float(line) for line in ran.stdout.split())
    assert abs(norm - 1) < 1e-5 and (product, absorbed) == (128.0, 4.0)

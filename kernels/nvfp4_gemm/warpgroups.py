"""Our product for Hopper: `cuda/nvfp4.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.nvfp4_gemm.packing import TILE_INPUTS, TILE_OUTPUTS
from kernels.nvfp4_gemm.tiling import Tiling, choose_tiling
from kernels.nvfp4_gemm.weight import Nvfp4
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "nvfp4.cu"
Arguments = structure(SOURCE, "Arguments")
# The CUDA source has the same constants.
MOST_EXPERTS, WARPGROUP = 512, 128
BOX_BYTES = 128


def takes(weight: Nvfp4) -> bool:
    """Whether this product takes the weight once it is packed."""
    experts, _, half = weight.codes.shape
    return is_hopper(weight.codes.device) and experts <= MOST_EXPERTS and 2 * half % TILE_INPUTS == 0


def nvfp4_grouped_gemm(
    x: torch.Tensor, weight: Nvfp4, ends: torch.Tensor, tiling: Tiling | None = None
) -> torch.Tensor:
    """Same as `kernels.nvfp4_gemm.nvfp4_grouped_gemm`, for packed weights."""
    assert weight.packed
    (rows, inputs), (experts, outputs, _) = x.shape, weight.codes.shape
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    if not rows:
        return out
    ctas = processors(x.device)
    tiling = tiling or choose_tiling(rows, experts, outputs, inputs, ctas)
    arguments = Arguments(
        x=encode_rows(x.data_ptr(), rows, 2 * inputs, tiling.rows, BOX_BYTES), codes=weight.codes.data_ptr(),
        scales=weight.scales.data_ptr(), global_scales=weight.global_scales.data_ptr(), ends=ends.data_ptr(),
        out=out.data_ptr(), experts=experts, output_tiles=outputs // TILE_OUTPUTS, groups=inputs // TILE_INPUTS,
        parts=weight.global_scales.shape[1],
    )  # fmt: skip
    name = f"nvfp4_{tiling.rows}_{tiling.warpgroups}_{tiling.parts}_{tiling.split}"
    kernel = load_kernel(SOURCE, name, x.device.index or 0)
    kernel.launch((ctas, 1, 1), (tiling.warpgroups + 1) * WARPGROUP, arguments, dependent=True)
    return out

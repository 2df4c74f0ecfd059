"""Says why a start found too little memory on a GPU: other processes hold it, or the model needs more."""

import torch

from engine.memory.memory_plan import LIBRARY_BYTES
from mesh.errors import EngineFailed

# What a driver or a display holds is no reason to look for other processes.
FEW_BYTES = 512 << 20

_END_THEM = (
    "end them (nvidia-smi lists them), or take other GPUs (CUDA_VISIBLE_DEVICES, or DEVICES with compose.gpu.yaml) or"
    " more of them"
)


def lacks_memory(error: RuntimeError) -> bool:
    """Torch's allocator has a class for it; CUDA's calls for graphs, which take memory too, have a message."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def full_gpu(device: torch.device) -> EngineFailed:
    """The error of a rank whose GPU had no room for what it loads. It may start once another process has ended."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        # Not even CUDA's own part of this process fits.
        return EngineFailed(f"the GPU is full: other processes hold all of its memory: {_END_THEM}")
    others = total - free - torch.cuda.memory_reserved(device) - LIBRARY_BYTES
    if others < FEW_BYTES:
        return EngineFailed(
            f"the GPU is full: this rank alone needs more than its {total / 1e9:,.1f} GB: take more GPUs, or"
            " engine.weights=fp8 or w4a8 where the weights are plain"
        )
    held = f"{others / 1e9:,.1f} of its {total / 1e9:,.1f} GB"
    return EngineFailed(
        f"the GPU is full: other processes hold {held}, and this rank needs more than the rest: {_END_THEM}"
    )

"""Says why a start found too little memory on a GPU: other processes hold it, or the model needs more."""

import torch

from engine.memory.memory_plan import LIBRARY_BYTES
from mesh.errors import EngineFailed


def lacks_memory(error: RuntimeError) -> bool:
    """Torch's allocator has a class for it; CUDA's calls for graphs, which take memory too, have a message."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def full_gpu(device: torch.device) -> EngineFailed:
    """The error of a rank whose GPU had no room for what it loads. It may start once another process has ended."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        # Not even CUDA's own part of this process fits.
        held = "all of its memory"
    else:
        others = max(total - free - torch.cuda.memory_reserved(device) - LIBRARY_BYTES, 0)
        held = f"{others / 1e9:,.1f} of its {total / 1e9:,.1f} GB"
    return EngineFailed(
        f"the GPU is full: other processes hold {held}, and this rank needs more than the rest: end them (nvidia-smi"
        " lists them), or take other GPUs (CUDA_VISIBLE_DEVICES, or DEVICES with compose.gpu.yaml) or more of them"
    )

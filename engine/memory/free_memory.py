"""How much memory a process can still allocate."""

import psutil
import torch

from engine.memory.memory_plan import left_of_share


def free_bytes(device: torch.device, share: float = 1.0) -> int:
    """Memory that this process can still allocate on the device, what torch keeps for later included.

    With a `share` of a GPU below 1 it is no more than is left of the share: processes that load at the same time may
    not have taken theirs yet.
    """
    if device.type == "cpu":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share == 1:
        return free
    return min(free, left_of_share(total, share, torch.cuda.memory_reserved(device)))

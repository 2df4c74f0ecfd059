"""How much memory a process can still allocate, and how much of it torch may keep."""

import psutil
import torch

from engine.memory.memory_plan import DRIVER_BYTES, left_of_share


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


def may_keep_all(device: torch.device, share: float) -> None:
    """Let torch allocate this process's share of a GPU, as a start does, which gives back what it does not need."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)


def leave_to_driver(device: torch.device, share: float, transfers_bytes: int) -> None:
    """Have torch leave some memory to the driver, which loads kernels that are first needed while the worker serves.

    Torch keeps what steps have freed, in pieces that do not fit the next ones. At its limit it gives these back before
    it takes more, and without a limit only once the driver has nothing left: of four H200 two had 3 MB after a load.
    What the start's largest steps took stays within the limit. transfers_bytes: of the GPU, which transfers take next,
    and past torch.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        steps = torch.cuda.max_memory_reserved(device) - reserved
        more = min(max(free - transfers_bytes - DRIVER_BYTES, steps), free)
        torch.cuda.set_per_process_memory_fraction(min((reserved + more) / total, share))

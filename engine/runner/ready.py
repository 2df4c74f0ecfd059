"""The line in a worker's log that says what its backend holds, once it is ready."""

import logging

import torch

from engine.memory.free_memory import free_bytes
from engine.memory.pool_plan import PoolPlan
from engine.memory.rank_memory import GB
from engine.settings.device import ResolvedEngineConfig

_log = logging.getLogger("deepmesh.engine")


def taken_bytes(device: torch.device) -> int:
    """What tensors take of the device so far; unknown on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def log_ready(
    resolved: ResolvedEngineConfig, device_name: str, loaded: int, pool: PoolPlan, device: torch.device
) -> None:
    """loaded: bytes of weights."""
    types = {"dtype": resolved.dtype, "kv_dtype": resolved.kv_dtype}
    fields = {"device": device_name, **types, "kv_blocks": pool.total_blocks, **_memory_fields(loaded, pool, device)}
    _log.info("model ready", extra={"fields": fields})


def _memory_fields(loaded: int, pool: PoolPlan, device: torch.device) -> dict[str, float]:
    """Where a GPU's memory is, in GB: weights, the pool, graphs, room for steps, and the rest."""
    if device.type == "cpu":
        return {}
    sizes = {
        "weights": loaded,
        "pool": pool.block_bytes * (pool.total_blocks + pool.foreign_blocks),
        "graphs": pool.graph_bytes,
        "workspace": pool.workspace_bytes,
        "free": free_bytes(device),
    }
    return {f"{name}_gb": round(size / GB, 1) for name, size in sizes.items()}

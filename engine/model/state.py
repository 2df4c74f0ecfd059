"""What a model needs on its device from step to step."""

import torch

from engine.model.context import DeviceState
from engine.model.model import Model, model_rotations
from kernels.fp8_gemm import make_workspace
from mesh.blocks import BLOCK_TOKENS


def make_state(
    model: Model, *, blocks: int, positions: int, rows: int, kv_dtype: torch.dtype, kv_scale: float = 1.0
) -> DeviceState:
    """A KV pool of `blocks` blocks and one for padding, for contexts of `positions` tokens and batches of `rows`."""
    shape = (model.config.kv_layers, blocks + 1, BLOCK_TOKENS, model.config.latent_dim)
    return DeviceState(
        rotations=model_rotations(model.config, positions, model.device),
        kv_pool=torch.zeros(shape, dtype=kv_dtype, device=model.device),
        kv_scale=kv_scale,
        padding_block=blocks,
        drawn=torch.zeros(rows, dtype=torch.int64, device=model.device),
        workspace=make_workspace(model.device),
    )

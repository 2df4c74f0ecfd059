"""What a model needs on its device from step to step."""

import torch

from engine.model.config import ModelConfig
from engine.model.context import DeviceState
from engine.model.decode_inputs import NO_TOKEN
from engine.model.model import model_rotations
from kernels.fp8_gemm import make_workspace
from mesh.blocks import BLOCK_TOKENS


def make_state(
    config: ModelConfig,
    device: torch.device,
    *,
    blocks: int,
    positions: int,
    rows: int,
    kv_dtype: torch.dtype,
    kv_scale: float = 1.0,
    drafts: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DeviceState:
    """A KV pool of `blocks` blocks and one for padding, for contexts of `positions` tokens and batches of `rows`, each
    with up to `drafts` drafts. dtype: of hidden states.
    """
    shape = (config.kv_layers, blocks + 1, BLOCK_TOKENS, config.latent_dim)
    draft_states = None
    if config.draft_layers > 1:
        states = config.draft_layers - 1, blocks + 2, config.hidden_size
        draft_states = torch.zeros(states, dtype=dtype, device=device)
    return DeviceState(
        rotations=model_rotations(config, positions, device),
        kv_pool=torch.zeros(shape, dtype=kv_dtype, device=device),
        kv_scale=kv_scale,
        padding_block=blocks,
        drawn=torch.zeros(rows, dtype=torch.int64, device=device),
        missing=torch.zeros(rows, dtype=torch.int32, device=device),
        thinks=torch.zeros(rows, dtype=torch.bool, device=device),
        guessed=torch.full((rows, drafts), NO_TOKEN, dtype=torch.int64, device=device),
        workspace=make_workspace(device),
        draft_states=draft_states,
    )

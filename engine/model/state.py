"""What a model needs on its device from step to step."""

import math
import mmap
from collections.abc import Sequence

import torch

from engine.model.config import ModelConfig
from engine.model.context import DeviceState
from engine.model.masked_rows import masked_until
from engine.model.model import model_rotations
from engine.model.sparse_attention import SparseMeter
from kernels.decode_rows import NO_TOKEN
from kernels.draft_check.pinned import PinnedAcceptance
from kernels.fp8_gemm import make_workspace
from kernels.index_keys import pool_shape
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
    index_dtype: torch.dtype = torch.float32,
    sparse: bool = False,
    pinned: Sequence[float] = (),
    quantized_prompts: bool = False,
) -> DeviceState:
    """A KV pool of `blocks` blocks and one for padding, for contexts of `positions` tokens and batches of `rows`, each
    with up to `drafts` drafts. dtype: of hidden states; index_dtype: in which index keys are kept, e4m3 if they are
    quantized; sparse: whether prompts that ask for sparse attention get it; pinned: shares of right drafts, see
    PinnedAcceptance; quantized_prompts: see DeviceState.
    """
    blocks_of = config.kv_layers, blocks + 1
    shapes = [((*blocks_of, BLOCK_TOKENS, config.latent_dim), kv_dtype)]
    if config.indexer is not None:
        keys, stored = pool_shape(config.indexer.width, index_dtype)
        shapes.append(((*blocks_of, *keys), stored))
    pool, *index_pool = _pools(shapes, device)
    draft_states = None
    if config.draft_layers > 1:
        states = config.draft_layers - 1, blocks + 2, config.hidden_size
        draft_states = torch.zeros(states, dtype=dtype, device=device)
    return DeviceState(
        rotations=model_rotations(config, positions, device),
        kv_pool=pool,
        kv_scale=kv_scale,
        padding_block=blocks,
        drawn=torch.zeros(rows, dtype=torch.int64, device=device),
        missing=torch.zeros(rows, dtype=torch.int32, device=device),
        thinks=torch.zeros(rows, dtype=torch.bool, device=device),
        guessed=torch.full((rows, drafts), NO_TOKEN, dtype=torch.int64, device=device),
        workspace=make_workspace(device),
        index_pool=index_pool[0] if index_pool else None,
        top_k=config.indexer.top_k if config.indexer is not None else 0,
        masked_until=masked_until(config, dtype, device),
        draft_states=draft_states,
        pinned=PinnedAcceptance(pinned, drafts, rows, device) if pinned else None,
        sparse_meter=SparseMeter() if sparse else None,
        quantized_prompts=quantized_prompts,
    )


def _pools(shapes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Zeros of these shapes and dtypes, one after another in one piece of memory; on a CPU in pages that the system
    gives when they are first written, so that no start waits for them.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    if device.type == "cpu":
        pages = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    else:
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    parts = memory.split(sizes)
    return [part.view(dtype).view(*shape) for part, (shape, dtype) in zip(parts, shapes, strict=True)]

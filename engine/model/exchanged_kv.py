"""KV of a chunk that all ranks compute together: each gets what the others have computed."""

import torch

from engine.model.context import ForwardContext, SharedLatents
from engine.model.expert_group import ExpertGroup
from kernels.index_keys import copy_in, copy_out


def exchange_kv(context: ForwardContext, shared: SharedLatents, layer: int, everybody: ExpertGroup) -> None:
    """Write the latents, and index keys if there are any, that other ranks have computed of a chunk in this layer,
    before anything attends to it. Every rank calls it.
    """
    pool = context.kv_pool[layer]
    # Viewed as bytes, because not every operation takes one-byte floats.
    slots = pool.view(torch.uint8).view(-1, pool.shape[-1] * pool.itemsize)
    latents = everybody.gather(slots[shared.own].view(pool.dtype)).view(torch.uint8)
    slots[shared.slots] = latents[shared.order]
    if context.index_pool is not None:
        keys = everybody.gather(copy_out(context.index_pool[layer], shared.own))
        copy_in(keys[shared.order], context.index_pool[layer], shared.slots)

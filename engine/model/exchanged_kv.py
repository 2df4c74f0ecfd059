"""KV of a chunk that all ranks compute together: each gets what the others have computed."""

from engine.model.context import ForwardContext, SharedLatents
from engine.model.expert_group import ExpertGroup
from kernels.index_keys import copy_in, copy_out
from kernels.kv_copy import place_latents, read_latents


def exchange_kv(context: ForwardContext, shared: SharedLatents, layer: int, everybody: ExpertGroup) -> None:
    """Write the latents, and index keys if there are any, that other ranks have computed of a chunk in this layer,
    before anything attends to it. Every rank calls it.
    """
    pool = context.kv_pool[layer]
    latents = everybody.gather(read_latents(pool, shared.own, pool.dtype))
    place_latents(latents, shared.order, pool, shared.slots)
    if context.index_pool is not None:
        keys = everybody.gather(copy_out(context.index_pool[layer], shared.own))
        copy_in(keys[shared.order], context.index_pool[layer], shared.slots)

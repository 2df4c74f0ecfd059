"""Latents out of the pool in Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def compress(x, scale):
    """float32 to e4m3, clamped to its range."""
    return tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0).to(tl.float8e4nv)


# A program reads one latent. Reads 1 byte a value, writes 2.
@triton.jit
def _read(pool, slots, out, width, scale, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    stored = tl.load(pool + tl.load(slots + token) * width + column, mask=column < width, other=0.0)
    latent = (stored.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * width + column, latent, mask=column < width)


def read_latents(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    tokens, width = slots.shape[0], pool.shape[2]
    out = torch.empty(tokens, width, dtype=dtype, device=pool.device)
    if tokens:
        _read[(tokens,)](pool, slots, out, width, scale, triton.next_power_of_2(width), num_warps=2)
    return out

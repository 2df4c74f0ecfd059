"""Attention to selected tokens by flash_mla's own kernels: by vLLM's build of its operators.

`DEEPMESH_FLASH_MLA` names that build (`_flashmla_C...so`). The kernel for prompts reads latents in bf16; the one for
decode reads 656 bytes a token, and multiplies in bf16.
"""

import os
from collections.abc import Callable

import torch

from bench.kernels.deepseek_r1 import LATENT, WIDTH
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan
from kernels.mla_decode.flash_mla import BUILD_VARIABLE
from kernels.mla_selected.reference import slots_of

# Channels of the decode kernel's latents that have a scale, and the bytes of a token.
GROUP = 128
TOKEN_BYTES = LATENT + 4 * LATENT // GROUP + 2 * (WIDTH - LATENT)
LARGEST_E4M3 = 448.0

Attend = Callable[[], torch.Tensor]


def available() -> bool:
    """Whether the environment names a build, which is loaded then."""
    build = os.environ.get(BUILD_VARIABLE)
    if build is not None:
        torch.ops.load_library(build)
    return build is not None


def for_prompts(
    query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, tokens: torch.Tensor, scale: float
) -> Attend:
    """Arguments as of `mla_selected`; pool: in bf16."""
    slots, latents = slots_of(tokens, plan).int().unsqueeze(1), pool.view(-1, 1, WIDTH)

    def attend() -> torch.Tensor:
        out: torch.Tensor = torch.ops._flashmla_C.sparse_prefill_fwd(
            query, latents, slots, scale, LATENT, None, None, None
        )[0]
        return out

    return attend


def for_decode(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, tokens: torch.Tensor, scale: float) -> Attend:
    """As `for_prompts`. The first call makes the schedule."""
    rows = query.view(plan.rows, plan.query_tokens, *query.shape[1:])
    slots = slots_of(tokens, plan).int().view(plan.rows, plan.query_tokens, -1)
    packed = pack(pool)
    schedule: list[torch.Tensor | None] = [None, None]

    def attend() -> torch.Tensor:
        out, _, *made = torch.ops._flashmla_C.sparse_decode_fwd(
            rows, packed, slots, None, None, *schedule, None, None, None, LATENT, scale, None
        )
        schedule[:] = made
        return out.view(len(query), -1, LATENT)  # type: ignore[no-any-return]

    attend()
    return attend


def pack(pool: torch.Tensor) -> torch.Tensor:
    """[blocks, 64, 1, 656] uint8 of a pool in bf16: by token 512 channels in e4m3, their four scales in float32, and
    the rotated channels in bf16.
    """
    latents = pool.view(-1, WIDTH)
    groups = latents[:, :LATENT].float().view(-1, LATENT // GROUP, GROUP)
    scales = groups.abs().amax(2) / LARGEST_E4M3
    values = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    parts = values.view(len(latents), LATENT), scales, latents[:, LATENT:].contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(-1, BLOCK_TOKENS, 1, TOKEN_BYTES)

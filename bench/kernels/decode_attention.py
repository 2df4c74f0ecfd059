"""Absorbed decode attention of DeepSeek-R1, from bf16 and e4m3 pools."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from bench.kernels.deepseek_r1 import HEADS, LATENT, NOPE, ROPE, WIDTH
from bench.kernels.inputs import random_bfloat16
from bench.kernels.timing import Case
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan, bf16, flash_mla, fp8, plan_decode
from kernels.mla_decode import triton as triton_decode

SCALE = (NOPE + ROPE) ** -0.5
E4M3 = torch.float8_e4m3fn
EXTENSION = "_flashmla_extension_C.abi3.so"

Attend = Callable[[torch.Tensor, torch.Tensor, DecodePlan], torch.Tensor]


def cases() -> Iterable[Case]:
    for requests in (32, 64, 96, 128):
        for context in (3500, 4096):
            yield from _cases(requests, context, HEADS, 1)
    yield from _cases(96, 4096, HEADS, 2)
    yield from _cases(128, 4096, 16, 1)


def _cases(requests: int, context: int, heads: int, query_tokens: int) -> Iterable[Case]:
    providers: list[tuple[str, torch.dtype, Attend]] = [
        ("deepmesh, Triton", torch.bfloat16, _triton_decode),
        ("deepmesh, Triton", E4M3, _triton_decode),
        ("deepmesh, CUDA", torch.bfloat16, lambda q, pool, plan: bf16.attend(q, pool, plan, SCALE).joined()),
    ]
    if flash_mla.available():
        providers.append(
            ("flash_mla", torch.bfloat16, lambda q, pool, plan: flash_mla.mla_decode(q, pool, plan, SCALE))
        )
    providers.append(("deepmesh, CUDA", E4M3, lambda q, pool, plan: fp8.attend(q, pool, plan, SCALE, 1.0).joined()))
    if heads == HEADS and _load_extension():
        providers.append(("flash_mla, FP8 extension", E4M3, _extension_decode))
    for provider, dtype, attend in providers:
        latents = requests * context * WIDTH
        yield Case(
            shape=f"decode {requests} x {context}, {heads} heads, {query_tokens} queries, {str(dtype)[6:]}",
            provider=provider,
            make=partial(_call, attend, dtype, requests, context, heads, query_tokens),
            size_bytes=latents * dtype.itemsize + 2 * requests * query_tokens * heads * (WIDTH + LATENT),
            flops=2.0 * requests * query_tokens * context * heads * (WIDTH + LATENT),
            fp8=dtype == E4M3,
        )


def _call(
    attend: Attend, dtype: torch.dtype, requests: int, context: int, heads: int, query_tokens: int
) -> Callable[[], object]:
    count = -(-context // BLOCK_TOKENS)
    pool = random_bfloat16(requests * count, BLOCK_TOKENS, WIDTH).to(dtype)
    table = torch.randperm(requests * count, device="cuda").to(torch.int32).view(requests, count)
    plan = plan_decode(table, torch.full((requests,), context, dtype=torch.int32, device="cuda"), query_tokens)
    query = random_bfloat16(requests * query_tokens, heads, WIDTH)
    # The first call makes the step's schedule, which all layers share, so that a layer's time does not include it.
    attend(query, pool, plan)
    return lambda: attend(query, pool, plan)


def _triton_decode(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return triton_decode.mla_decode(query, pool, plan, LATENT, SCALE, 1.0, processors)


def _load_extension() -> bool:
    """Load flash_mla's decode attention over e4m3 pools, if vLLM's build of it lies next to its `_flashmla_C`."""
    build = os.environ.get(flash_mla.BUILD_VARIABLE)
    if build is None or not (extension := Path(build).with_name(EXTENSION)).exists():
        return False
    torch.ops.load_library(str(extension))
    return True


def _extension_decode(query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    operators, schedule = torch.ops._flashmla_extension_C, plan.schedule
    heads, one = query.shape[1], torch.ones(1, device=query.device)
    if schedule.metadata is None:
        rows = plan.query_tokens * heads
        schedule.metadata, schedule.splits = operators.get_mla_decoding_metadata_dense_fp8(plan.lengths, rows, 1)
    quantized = query.to(E4M3).view(plan.rows, plan.query_tokens, heads, WIDTH)
    out: torch.Tensor = operators.fwd_kvcache_mla_fp8(
        quantized, pool.unsqueeze(2), LATENT, plan.lengths, plan.block_table, SCALE, plan.query_tokens > 1,
        schedule.metadata, schedule.splits, one, one,
    )[0]  # fmt: skip
    return out

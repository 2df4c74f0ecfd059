"""Attention of DeepSeek-V3.2 to selected tokens: index keys and scores, the choice, and MLA over what is chosen."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType

import torch

from bench.kernels import score_peers, selected_peers
from bench.kernels.deepseek_r1 import HEADS, LATENT, NOPE, ROPE, WIDTH
from bench.kernels.inputs import random_bfloat16, random_rotations
from bench.kernels.timing import Case
from kernels.index_keys import EPSILON, SCALE_BYTES, IndexQueries, make_queries, pool_shape, write_keys
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan, mla_decode, plan_decode
from kernels.top_tokens import top_tokens

INDEX_HEADS, INDEX_WIDTH, TOP_K = 64, 128, 2048
# In which the heads' weights of few tokens are computed.
SHARES = 7
KEY_BYTES = INDEX_WIDTH + SCALE_BYTES
SCALE = (NOPE + ROPE) ** -0.5
E4M3 = torch.float8_e4m3fn
# By provider, the modules of the four operations.
OPERATIONS = "index_keys", "index_scores", "top_tokens", "mla_selected"
PROVIDERS = {"deepmesh, Triton": ("triton",) * 4, "deepmesh, CUDA": ("rows", "warpgroups", "clusters", "gathered")}
# Requests, their context, and the queries of each: tokens that decode, with drafts, and a part of a prompt.
DECODING = (64, 3500, 1), (96, 3500, 1), (128, 3500, 1), (64, 32768, 1), (64, 32768, 3), (8, 131072, 1)
SHAPES = (*DECODING, (1, 32768, 2048), (1, 131072, 512))


# Queries of dense attention to as many tokens, at whose rate attention to selected ones is wanted.
DENSE = 64, 96, 128, 192


def cases() -> Iterable[Case]:
    for requests, context, queries in SHAPES:
        for provider, modules in PROVIDERS.items():
            names = (f"kernels.{operation}.{module}" for operation, module in zip(OPERATIONS, modules, strict=True))
            yield from _of_shape(requests, context, queries, provider, *map(import_module, names))
    if score_peers.available():
        for requests, context, queries in SHAPES:
            if queries == 1 or requests == 1:
                yield _scores(requests, context, queries, "deep_gemm", score_peers.scores)
    if selected_peers.available():
        for shape in SHAPES:
            yield _attention(
                *shape, torch.bfloat16, "flash_mla, for prompts", _attend_by(selected_peers.for_prompts, *shape)
            )
            yield _attention(*shape, E4M3, "flash_mla, for decode", _attend_by(selected_peers.for_decode, *shape))
    for rows, dtype in product(DENSE, (torch.bfloat16, E4M3)):
        yield Case(
            f"attention {rows} x {TOP_K}, {str(dtype)[6:]}", "deepmesh, dense", partial(_attend_to_all, dtype, rows),
            size_bytes=rows * TOP_K * WIDTH * dtype.itemsize, flops=2.0 * rows * TOP_K * HEADS * (WIDTH + LATENT),
            fp8=dtype == E4M3,
        )  # fmt: skip


def _of_shape(
    requests: int,
    context: int,
    queries: int,
    provider: str,
    index: ModuleType,
    scores: ModuleType,
    choice: ModuleType,
    attention: ModuleType,
) -> Iterable[Case]:
    shape, rows = f"{requests} x {context}, {queries} queries", requests * queries
    yield Case(
        f"index queries and keys, {rows} tokens", provider, partial(_make_index, index, rows),
        size_bytes=rows * (INDEX_HEADS + 1) * (2 * INDEX_WIDTH + KEY_BYTES),
    )  # fmt: skip
    yield _scores(requests, context, queries, provider, partial(_score_by, scores))
    chosen_of = 4 * rows * context
    yield Case(f"top {TOP_K} of {shape}", provider, partial(_choose, choice, rows, context), size_bytes=chosen_of)
    for dtype in (torch.bfloat16, E4M3):
        make = partial(attend, attention, dtype, requests, context, queries)
        yield _attention(requests, context, queries, dtype, provider, make)


def _scores(
    requests: int, context: int, queries: int, provider: str, scores: Callable[..., Callable[[], object]]
) -> Case:
    """scores: gives the call, of queries, the pool and the plan."""
    pairs = requests * queries * context
    return Case(
        f"index scores {requests} x {context}, {queries} queries", provider,
        lambda: scores(*_to_score(requests, context, queries)),
        size_bytes=requests * context * KEY_BYTES + 4 * pairs, flops=2.0 * pairs * INDEX_HEADS * INDEX_WIDTH,
        fp8=True,
    )  # fmt: skip


def _attention(
    requests: int,
    context: int,
    queries: int,
    dtype: torch.dtype,
    provider: str,
    make: Callable[[], Callable[[], object]],
) -> Case:
    selected = requests * queries * min(context, TOP_K)
    return Case(
        f"attention {requests} x {context}, {queries} queries, {str(dtype)[6:]}", provider, make,
        size_bytes=selected * WIDTH * dtype.itemsize, flops=2.0 * selected * HEADS * (WIDTH + LATENT),
        fp8=dtype == E4M3,
    )  # fmt: skip


def _plan(requests: int, context: int, queries: int) -> DecodePlan:
    count = -(-context // BLOCK_TOKENS)
    table = torch.randperm(requests * count, device="cuda").to(torch.int32).view(requests, count)
    return plan_decode(table, torch.full((requests,), context, dtype=torch.int32, device="cuda"), queries)


def _pool(blocks: int) -> torch.Tensor:
    """Index keys that are drawn at random."""
    shape, dtype = pool_shape(INDEX_WIDTH, E4M3)
    pool, tokens = torch.zeros(blocks, *shape, dtype=dtype, device="cuda"), blocks * BLOCK_TOKENS
    _write(pool, random_bfloat16(tokens, INDEX_WIDTH), torch.arange(tokens, device="cuda"))
    return pool


def _write(pool: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    norm = torch.ones(INDEX_WIDTH, device="cuda")
    write_keys(keys, norm, torch.zeros_like(norm), random_rotations(len(keys), ROPE), slots, pool, interleaved=False)


def _make_index(index: ModuleType, tokens: int) -> Callable[[], object]:
    pool, slots = _pool(-(-tokens // BLOCK_TOKENS)), torch.randperm(tokens, device="cuda")
    keys, queries = random_bfloat16(tokens, INDEX_WIDTH), random_bfloat16(tokens, INDEX_HEADS, INDEX_WIDTH)
    weights, turns = torch.randn(SHARES, tokens, INDEX_HEADS, device="cuda"), random_rotations(tokens, ROPE)
    norm = torch.ones(INDEX_WIDTH, device="cuda")
    bias = torch.zeros_like(norm)

    def call() -> object:
        index.write_keys(keys, norm, bias, EPSILON, turns, slots, pool, False)
        made: object = index.make_queries(queries, weights, 1.0, turns, True, False)
        return made

    return call


def _to_score(requests: int, context: int, queries: int) -> tuple[IndexQueries, torch.Tensor, DecodePlan]:
    plan = _plan(requests, context, queries)
    pool, rows = _pool(plan.block_table.numel()), requests * queries
    weights, turns = torch.randn(1, rows, INDEX_HEADS, device="cuda"), random_rotations(rows, ROPE)
    projected = random_bfloat16(rows, INDEX_HEADS, INDEX_WIDTH)
    return make_queries(projected, weights, turns, pool, factor=1.0, interleaved=False), pool, plan


def _score_by(scores: ModuleType, queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan) -> Callable[[], object]:
    def call() -> object:
        out = torch.empty(
            len(queries.values), BLOCK_TOKENS * plan.block_table.shape[1], dtype=torch.float32, device="cuda"
        )
        scores.index_scores(queries, pool, plan, out)
        return out

    return call


def _attend_to_all(dtype: torch.dtype, rows: int) -> Callable[[], object]:
    plan = _plan(rows, TOP_K, 1)
    pool = random_bfloat16(plan.block_table.numel(), BLOCK_TOKENS, WIDTH).to(dtype)
    query = random_bfloat16(rows, HEADS, WIDTH)
    return lambda: mla_decode(query, pool, plan, value_width=LATENT, scale=SCALE, kv_scale=1.0).joined()


def _choose(choice: ModuleType, rows: int, context: int) -> Callable[[], object]:
    scores = torch.randn(rows, context, device="cuda")
    seen = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    return lambda: choice.top_tokens(scores, seen, TOP_K)


def attend(
    attention: ModuleType, dtype: torch.dtype, requests: int, context: int, queries: int, heads: int = HEADS
) -> Callable[[], object]:
    query, pool, plan, tokens = _selected(requests, context, queries, heads)
    stored = pool.to(dtype)
    return lambda: attention.mla_selected(query, stored, plan, tokens, LATENT, SCALE, 1.0)


def _attend_by(
    peer: Callable[..., Callable[[], object]], requests: int, context: int, queries: int
) -> Callable[[], Callable[[], object]]:
    return lambda: peer(*_selected(requests, context, queries, HEADS), SCALE)


def _selected(
    requests: int, context: int, queries: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor, DecodePlan, torch.Tensor]:
    """Queries, a pool in bf16, the plan, and the tokens that are attended to, drawn at random."""
    plan = _plan(requests, context, queries)
    pool = random_bfloat16(plan.block_table.numel(), BLOCK_TOKENS, WIDTH)
    query, rows = random_bfloat16(requests * queries, heads, WIDTH), requests * queries
    seen = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    return query, pool, plan, top_tokens(torch.randn(rows, context, device="cuda"), seen, TOP_K)

"""Decode attention's backends against the reference; without a GPU, Triton's runs in the interpreter."""

import pytest
import torch

from bench.kernels.deepseek_r1 import HEADS, LATENT, WIDTH
from kernels.mla_decode import DecodePlan, flash_mla, mla_decode, plan_decode, reference
from kernels.mla_decode import triton as ours
from tests.support.latents import ScatteredContexts, scattered_contexts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE, KV_SCALE = 0.12, 0.5
E4M3 = torch.float8_e4m3fn


class Case:
    """Random queries over scattered contexts in a pool that is poisoned elsewhere."""

    def __init__(self, lengths: list[int], query_tokens: int, heads: int, widths: tuple[int, int], e4m3: bool) -> None:
        self.value_width, width = widths
        self.kv_scale = KV_SCALE if e4m3 else 1.0
        stored: ScatteredContexts = scattered_contexts([length + query_tokens - 1 for length in lengths], width)
        pool = (stored.pool / self.kv_scale).to(DEVICE)
        self.pool = pool.to(E4M3) if e4m3 else pool.bfloat16()
        self.query = torch.randn(len(lengths) * query_tokens, heads, width, device=DEVICE).bfloat16()
        self.plan: DecodePlan = plan_decode(stored.block_table.to(DEVICE), stored.lengths.to(DEVICE), query_tokens)

    def error(self, found: torch.Tensor) -> float:
        """Relative norm of the difference from the reference; NaN if poison was read or output is missing."""
        expected = reference.mla_decode(
            self.query.float(), self.pool.float(), self.plan, self.value_width, SCALE * self.kv_scale, 1.0
        )
        expected *= self.kv_scale
        assert found.shape == expected.shape
        return float((found.float() - expected).norm() / expected.norm()) if found.numel() else 0.0


def small_case(query_tokens: int, e4m3: bool) -> Case:
    return Case([1, 64, 65, 200], query_tokens, heads=3, widths=(32, 40), e4m3=e4m3)


@pytest.mark.parametrize("query_tokens", [1, 3])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("processors", [1, 16])
def test_triton_attends_in_one_pass_and_in_splits(query_tokens: int, e4m3: bool, processors: int) -> None:
    case = small_case(query_tokens, e4m3)
    found = ours.mla_decode(case.query, case.pool, case.plan, case.value_width, SCALE, case.kv_scale, processors)
    assert case.error(found) < 0.02


LENGTHS = {
    "one": [1],
    "ragged": [1, 63, 64, 65, 127, 128, 129, 1000, 3, 257],
    "long": [9000],
    "even": [3500] * 96,
    "many short": list(range(1, 140)),
    "fewer than the chip holds": [300, 64],
}


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("query_tokens", [1, 2])
@pytest.mark.parametrize("heads", [16, 64, HEADS])
def test_an_e4m3_pool_is_attended_to_at_deepseeks_shapes(
    lengths: list[int], query_tokens: int, heads: int, poisoned: None
) -> None:
    case = Case(lengths, query_tokens, heads, (LATENT, WIDTH), e4m3=True)
    found = mla_decode(
        case.query, case.pool, case.plan, value_width=LATENT, scale=SCALE, kv_scale=case.kv_scale
    ).joined()
    # Queries and probabilities have three bits of mantissa too.
    assert case.error(found) < 0.08


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("query_tokens", [1, 2, 4])
@pytest.mark.parametrize("heads", [16, 64, HEADS])
@pytest.mark.parametrize("provider", ["ours, CUDA", "ours, Triton", "flash_mla"])
def test_a_bfloat16_pool_is_attended_to_at_deepseeks_shapes(
    lengths: list[int], query_tokens: int, heads: int, provider: str, poisoned: None
) -> None:
    from kernels.mla_decode import bf16

    case = Case(lengths, query_tokens, heads, (LATENT, WIDTH), e4m3=False)
    if provider == "ours, CUDA":
        if not bf16.takes(case.query, case.pool, case.value_width):
            pytest.skip("needs a Hopper GPU")
        found = bf16.attend(case.query, case.pool, case.plan, SCALE).joined()
    elif provider == "ours, Triton":
        processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        found = ours.mla_decode(case.query, case.pool, case.plan, LATENT, SCALE, 1.0, processors)
    else:
        if not flash_mla.takes(case.query, case.pool, case.value_width):
            pytest.skip("needs flash_mla")
        found = flash_mla.mla_decode(case.query, case.pool, case.plan, SCALE)
    assert case.error(found) < 0.01


def attend_on_hopper(case: Case) -> torch.Tensor:
    """Run the CUDA kernel for the case's pool."""
    from kernels.mla_decode import bf16, fp8

    if fp8.takes(case.query, case.pool, case.value_width):
        return fp8.attend(case.query, case.pool, case.plan, SCALE, case.kv_scale).joined()
    if not bf16.takes(case.query, case.pool, case.value_width):
        pytest.skip("needs a Hopper GPU")
    return bf16.attend(case.query, case.pool, case.plan, SCALE).joined()


def as_rounded(query: torch.Tensor) -> torch.Tensor:
    """The queries after quantization to e4m3 with a scale for each head."""
    scale = query.float().abs().amax(dim=2, keepdim=True) / 448
    return (query.float() / scale).to(E4M3).float() * scale


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, HEADS])
@pytest.mark.parametrize("e4m3", [False, True])
def test_a_row_may_have_more_queries_than_a_block(heads: int, e4m3: bool) -> None:
    case = Case([1, 64, 65, 300], 70, heads, (LATENT, WIDTH), e4m3=e4m3)
    assert case.error(attend_on_hopper(case)) < (0.08 if e4m3 else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("e4m3", [False, True])
def test_scores_that_grow_along_the_context_keep_their_precision(e4m3: bool) -> None:
    case = Case([2000, 777], 1, HEADS, (LATENT, WIDTH), e4m3=e4m3)
    for row, length in enumerate([2000, 777]):
        for block in range(-(-length // 64)):
            index = case.plan.block_table[row, block].long()
            case.pool[index] = (case.pool[index].float() * (0.2 * (block + 1))).to(case.pool.dtype)
    found = attend_on_hopper(case)
    if e4m3:
        # Scores this large show the rounding of the queries. What is tested here is the rounding of probabilities.
        case.query = as_rounded(case.query)
    assert case.error(found) < (0.05 if e4m3 else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2048, 16384])
@pytest.mark.parametrize("query_tokens", [1, 2])
def test_sums_over_a_long_context_lose_nothing(tokens: int, query_tokens: int) -> None:
    """Values of one: no product cancels another, and the tensor cores' own sums are short."""
    rows, blocks = 140, tokens // 64
    # Enough requests that each is one piece; all of them have the same blocks.
    pool = torch.ones(blocks, 64, WIDTH, device=DEVICE).to(E4M3)
    # Scores differ by their other channels: probabilities that are powers of two would be summed exactly.
    pool[:, :, LATENT:] = torch.randn(blocks, 64, WIDTH - LATENT, device=DEVICE).to(E4M3)
    table = torch.arange(blocks, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
    plan = plan_decode(table, torch.full((rows,), tokens, dtype=torch.int32, device=DEVICE), query_tokens)
    query = torch.randn(rows * query_tokens, HEADS, WIDTH, device=DEVICE).bfloat16()
    found = mla_decode(query, pool, plan, value_width=LATENT, scale=SCALE, kv_scale=KV_SCALE).joined()
    assert (found.float() / KV_SCALE - 1).abs().max() < 0.005


@pytest.mark.gpu
def test_equal_contexts_are_not_split_if_each_finds_a_part() -> None:
    from kernels.mla_decode import bf16

    case = Case([3500] * 64, 1, HEADS, (LATENT, WIDTH), e4m3=False)
    if not bf16.takes(case.query, case.pool, case.value_width):
        pytest.skip("needs a Hopper GPU")
    bf16.attend(case.query, case.pool, case.plan, SCALE)
    made = case.plan.schedule.metadata
    assert made.parts[:65].tolist() == list(range(65))
    assert set(made.pieces[:64, 0].tolist()) == set(range(64)) and (made.pieces[:64, 3] < 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("e4m3", [False, True])
def test_a_captured_plan_follows_its_tensors(e4m3: bool) -> None:
    case = Case([500, 64, 1000], 1, HEADS, (LATENT, WIDTH), e4m3=e4m3)
    longest = case.plan.lengths.clone()
    graph = torch.cuda.CUDAGraph()

    def attend() -> torch.Tensor:
        plan = plan_decode(case.plan.block_table, case.plan.lengths)
        return mla_decode(case.query, case.pool, plan, value_width=LATENT, scale=SCALE, kv_scale=case.kv_scale).joined()

    attend()
    with torch.cuda.graph(graph):
        found = attend()
    for lengths in [[1, 64, 700], [500, 2, 129]]:
        case.plan.lengths.copy_(torch.tensor(lengths))
        found.fill_(float("nan"))
        graph.replay()
        assert case.error(found) < 0.08
    case.plan.lengths.copy_(longest)

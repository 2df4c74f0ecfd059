"""Attention of a few tokens with few heads, and values of its pieces; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import plan_decode, reference
from kernels.mla_projections.reference import expand_values
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

few_rows = pytest.importorskip("kernels.mla_decode.few_rows")
few_pieces = pytest.importorskip("kernels.mla_projections.few_pieces")

LATENT, WIDTH, SCALE = 512, 576, 0.05
pytestmark = pytest.mark.usefixtures("poisoned")


def assert_attended(lengths: list[int], query_tokens: int, heads: int, value: int, device: torch.device) -> None:
    """lengths: of contexts, queries included."""
    rows, most = len(lengths), -(-max(lengths) // BLOCK_TOKENS)
    pool = torch.randn(rows * most, BLOCK_TOKENS, WIDTH, device=device).bfloat16()
    table = torch.randperm(rows * most, device=device).int().view(rows, most)
    # Tokens after a context, and blocks after its last one, may hold anything.
    for row, length in enumerate(lengths):
        pool[table[row, length // BLOCK_TOKENS :].long()[:1], length % BLOCK_TOKENS :] = float("nan")
        table[row, -(-length // BLOCK_TOKENS) :] = 1 << 20
    plan = plan_decode(table, torch.tensor(lengths, dtype=torch.int32, device=device), query_tokens)
    query = torch.randn(rows * query_tokens, heads, WIDTH, device=device).bfloat16()
    weight = torch.randn(heads, value + 8, LATENT, device=device).bfloat16()[:, 8:].transpose(1, 2) / LATENT**0.5
    known = torch.where(pool.isnan(), 0.0, pool.float())
    latents = reference.mla_decode(query.float(), known, plan, LATENT, SCALE, 1.0)
    attended = few_rows.attend(query, pool, plan, SCALE)
    found = few_pieces.expand_pieces(attended, weight)
    assert relative_error(found, expand_values(latents, weight.float())) < 0.01
    assert relative_error(attended.joined(), latents) < 0.01


# Contexts of less than a block, of a piece for each block, and of several blocks a piece; a block that just began.
@pytest.mark.parametrize(
    ("lengths", "query_tokens", "pieces"),
    [([5], 1, 128), ([300], 1, 4), ([65, 128], 2, 128), ([700, 2], 1, 6)],
    ids=str,
)
def test_few_tokens_attend_as_defined(
    lengths: list[int], query_tokens: int, pieces: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "PIECES", pieces)
    monkeypatch.setattr(few_pieces, "PIECES", 4)
    assert_attended(lengths, query_tokens, 3, 40, device)


@pytest.mark.gpu
@on_hopper
# One request, one whose pieces have several blocks, drafts, and several requests.
@pytest.mark.parametrize(
    ("lengths", "query_tokens"),
    [([3500], 1), ([90000], 1), ([3503], 4), ([64, 9000], 2), ([700, 65, 3000], 1)],
    ids=str,
)
# Moonlight's heads, and GLM-4.7-Flash's.
@pytest.mark.parametrize(("heads", "value"), [(16, 128), (20, 256)])
def test_published_heads_attend(lengths: list[int], query_tokens: int, heads: int, value: int) -> None:
    assert_attended(lengths, query_tokens, heads, value, torch.device("cuda"))

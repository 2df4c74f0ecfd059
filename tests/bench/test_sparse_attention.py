import pytest
import torch

from bench.kernels.sparse_attention import LENGTHS, cases, selection_of
from kernels.sparse_prefill import kept_blocks, sparse_prefill

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "share"), [(32768, 0.2), (32768, 0.05), (16384, 0.1)])
def test_a_selection_keeps_about_the_share_that_its_row_says(tokens: int, share: float) -> None:
    selected = selection_of(tokens, 4, share, CPU)
    kept = kept_blocks(selected, tokens, tokens, 0).sum()
    # Each tile of 128 queries sees two blocks more than the one before it.
    tiles = tokens // 128
    assert 0.8 * share < kept / (4 * tiles * (tiles + 1)) < 1.25 * share


def test_what_is_timed_runs_at_a_small_size() -> None:
    query, (own, value) = torch.randn(300, 2, 24), torch.randn(2, 300, 2, 16)
    selected = selection_of(300, 2, 0.5, CPU)
    out, log_sum = torch.empty(300, 2, 16), torch.empty(2, 300)
    sparse_prefill(query, own, torch.randn(300, 8), value, selected, out, log_sum, first_query=0, scale=1.0)
    assert out.isfinite().all() and log_sum.isfinite().all()
    assert len(list(cases())) == sum(len(shares) + 4 for shares in LENGTHS.values())

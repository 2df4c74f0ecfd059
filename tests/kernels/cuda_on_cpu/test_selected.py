"""Attention to selected tokens on the CPU, with the sources that divide its work and join its pieces."""

import pytest
import torch

from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.selected_contexts import SCALE, SelectedContexts


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.005), (torch.float8_e4m3fn, 0.06)])
@pytest.mark.parametrize(
    ("lengths", "query_tokens", "heads", "count"), [([200, 65], 1, 64, 128), ([3, 70], 2, 20, 192)]
)
def test_queries_attend_to_their_tokens(
    lengths: list[int], query_tokens: int, heads: int, count: int, dtype: torch.dtype, error: float, on_cpu: CudaOnCpu
) -> None:
    attend = on_cpu.module("mla_selected.gathered").mla_selected
    case = SelectedContexts(lengths, query_tokens, count, heads, (512, 576), dtype, torch.device("cpu"))
    assert case.error(attend(case.query, case.pool, case.plan, case.tokens, 512, SCALE, case.kv_scale)) < error

"""What ranks that divide the experts among them send each other."""

from collections.abc import Callable

import pytest
import torch

from engine.exchange.host import HostExchange
from engine.model.activations import Sent
from engine.model.expert_group import Dispatched, ExpertGroup
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from kernels.act_quant import Quantized, dequantize, quantize
from kernels.expert_rows import quantize_rows
from kernels.w4a8_gemm import ScaledRows
from tests.support.rank_threads import on_each_rank

RANKS, WIDTH = 2, 256


def by_row(rows: torch.Tensor) -> ScaledRows:
    return quantize_rows(rows, None, None)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("form", ["bfloat16", "FP8", "FP8 by row"])
def test_all_ranks_get_all_rows_with_their_experts(tokens: int, form: str) -> None:
    rows = torch.randn(RANKS * tokens, WIDTH).bfloat16()
    weights, choices = torch.rand(RANKS * tokens, 8), torch.randint(64, (RANKS * tokens, 8))

    def act(peers: Peers) -> Dispatched:
        group = ExpertGroup(HostExchange(peers))
        own = slice(peers.place.rank * tokens, (peers.place.rank + 1) * tokens)
        sent: dict[str, Callable[[], Sent]] = {
            "bfloat16": lambda: rows[own],
            "FP8": lambda: quantize(rows[own]),
            "FP8 by row": lambda: by_row(rows[own]),
        }
        return group.begin_dispatch(sent[form](), weights[own], choices[own]).finish()

    for found, found_weights, found_choices, way_back in on_each_rank(Layout(dp=RANKS), act):
        if isinstance(found, Quantized):
            assert form == "FP8" and torch.equal(dequantize(found), dequantize(quantize(rows)))
        elif isinstance(found, ScaledRows):
            expected = by_row(rows)
            assert form == "FP8 by row" and torch.equal(found.values.float(), expected.values.float())
            assert torch.equal(found.scales, expected.scales)
        else:
            assert form == "bfloat16" and torch.equal(found, rows)
        assert torch.equal(found_weights, weights) and torch.equal(found_choices, choices) and way_back is None

import pytest
import torch

from kernels.moe_gate.logits import SHARED_TILES, gate_logits, gate_weight

triton_logits = pytest.importorskip("kernels.moe_gate.triton_logits")


@pytest.mark.parametrize(("tokens", "experts", "width"), [(1, 8, 128), (33, 40, 1000), (70, 32, 4096), (0, 8, 128)])
def test_logits_are_the_products_summed_in_float32(device: torch.device, tokens: int, experts: int, width: int) -> None:
    # The interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = gate_weight(torch.randn(experts, width, device=device).to(dtype))
    expected = hidden.float() @ weight.values.float().t()
    for _ in range(2):
        found = triton_logits.gate_logits(hidden, weight.values, weight.arrivals)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert not weight.arrivals.any()
    assert (gate_logits(hidden, weight) - expected).norm() <= 1e-5 * expected.norm()


def test_as_many_tokens_are_shared_out_as_there_are_counters() -> None:
    assert triton_logits.tiles(256, 256) == SHARED_TILES

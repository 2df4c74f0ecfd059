import pytest
import torch

from kernels.linear import MOST_TOKENS, multiply_in_shares

triton_shares = pytest.importorskip("kernels.linear.triton_shares")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("tokens", "experts", "width"), [(1, 8, 128), (33, 40, 1000), (70, 32, 4096), (0, 8, 128)])
def test_logits_are_the_products_summed_in_float32(device: torch.device, tokens: int, experts: int, width: int) -> None:
    hidden = torch.randn(tokens, width, device=device).bfloat16()
    weight = torch.randn(experts, width, device=device).bfloat16()
    expected = hidden.float() @ weight.float().t()
    for found in (triton_shares.multiply_in_shares(hidden, weight), multiply_in_shares(hidden, weight)):
        assert found.shape[1:] == expected.shape
        assert (found.sum(0) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.gpu
def test_logits_of_many_tokens_are_the_products_summed_in_float32(device: torch.device) -> None:
    hidden, weight = torch.randn(MOST_TOKENS + 1, 512, device=device), torch.randn(40, 512, device=device)
    found = multiply_in_shares(hidden.bfloat16(), weight.bfloat16())
    expected = hidden.bfloat16().float() @ weight.bfloat16().float().t()
    assert found.shape == (1, *expected.shape) and (found[0] - expected).norm() <= 1e-5 * expected.norm()

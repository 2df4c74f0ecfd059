"""Products of few tokens with few outputs, on Hopper, against its definition."""

import pytest
import torch

from bench.kernels.deepseek_r1 import EXPERTS, HIDDEN
from kernels.linear import few_tokens
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

pytestmark = [
    pytest.mark.gpu,
    on_hopper,
    pytest.mark.usefixtures("poisoned"),
]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize("tokens", [0, 1, 17, 32, 33, 64, 65, 96, 100, 129, few_tokens.MOST_TOKENS])
@pytest.mark.parametrize(("experts", "inputs"), [(EXPERTS, HIDDEN), (512, 576), (64, 64)])
def test_logits_are_the_products_summed_in_float32(tokens: int, experts: int, inputs: int) -> None:
    hidden, weight = random(tokens, inputs).bfloat16(), random(experts, inputs).bfloat16()
    assert few_tokens.takes(hidden, weight)
    found = few_tokens.multiply_in_shares(hidden, weight)
    expected = hidden.double() @ weight.double().t()
    assert found.dtype == torch.float32 and found.shape[1:] == expected.shape
    assert relative_error(found.double().sum(0), expected) < 1e-5


def test_many_tokens_and_other_shapes_are_not_taken() -> None:
    hidden, weight = random(4, 1024).bfloat16(), random(256, 1024).bfloat16()
    assert few_tokens.takes(hidden, weight)
    assert not few_tokens.takes(random(few_tokens.MOST_TOKENS + 1, 1024).bfloat16(), weight)
    assert not few_tokens.takes(hidden, weight[:200])
    assert not few_tokens.takes(random(4, 1000).bfloat16(), random(256, 1000).bfloat16())
    assert not few_tokens.takes(random(4, 2048).bfloat16()[:, :1024], weight)
    assert not few_tokens.takes(random(4 * 1024 + 1).bfloat16()[1:].view(4, 1024), weight)

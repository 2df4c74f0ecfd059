"""What models' tokens cost, compared with DeepSeek-R1's."""

import pytest

from engine.settings.model_cost import active_weights, context_seconds, requests_for_one, tokens_for_one
from tests.support.situations import model_of


def test_r1_is_what_others_are_compared_with() -> None:
    model = model_of("r1", "fp8")
    assert requests_for_one(model) == pytest.approx(1, rel=0.01)
    assert tokens_for_one(model) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(("shape", "billions"), [("r1", 37), ("moonlight", 2.5), ("v2-lite", 2.4), ("glm-flash", 3.6)])
def test_active_weights_are_about_what_publishers_say(shape: str, billions: float) -> None:
    assert active_weights(model_of(shape, "bf16")) / 1e9 == pytest.approx(billions, rel=0.05)


def test_many_heads_compute_and_few_read() -> None:
    r1, moonlight = model_of("r1", "fp8"), model_of("moonlight", "bf16")
    flops_of_a_head = 2 * (512 + 64 + 512)
    assert context_seconds(r1) == 61 * 128 * flops_of_a_head / 600e12
    assert context_seconds(moonlight) == 27 * (512 + 64) * 2 / 4.2e12

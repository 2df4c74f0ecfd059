"""The gate's kernels between others that start while the one before them ends."""

from collections.abc import Callable

import pytest
import torch

from kernels.hopper import is_hopper
from kernels.moe_gate import moe_gate
from kernels.moe_gate.logits import gate_logits
from kernels.norm import add_rms_norm

HIDDEN, EXPERTS, LAYERS, REPLAYS = 1024, 256, 6, 100


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 32, 64, 90, 150])
def test_a_captured_gate_gives_what_its_kernels_give_one_after_another_every_time(tokens: int) -> None:
    norms = torch.rand(LAYERS, HIDDEN, device="cuda").bfloat16()
    weights = torch.randn(LAYERS, EXPERTS, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
    bias = torch.randn(EXPERTS, device="cuda") / 10

    def chain(delta: torch.Tensor, after_each: Callable[[], object]) -> torch.Tensor:
        residual = torch.zeros_like(delta)
        found: list[torch.Tensor] = []
        for norm, weight in zip(norms, weights, strict=True):
            hidden = add_rms_norm(delta, residual, norm, 1e-6)
            after_each()
            logits = gate_logits(hidden, weight)
            after_each()
            chosen = moe_gate(
                logits,
                bias,
                experts_per_token=8,
                groups=8,
                groups_per_token=4,
                normalize=True,
                scaling=2.5,
                shared=1,
            )
            after_each()
            delta = hidden
            found += chosen
        return torch.stack([each.double() for each in found])

    given = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    inputs = [torch.randn_like(given) for _ in range(4)]
    expected = [chain(each, torch.cuda.synchronize) for each in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(given, lambda: None)
    for replay in range(REPLAYS):
        given.copy_(inputs[replay % 4])
        graph.replay()
        assert torch.equal(found, expected[replay % 4])

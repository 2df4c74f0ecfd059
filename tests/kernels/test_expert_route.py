"""How tokens are routed to copies of experts."""

import pytest
import torch

from kernels.expert_route import reference, route, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_copies_of_an_expert_take_turns() -> None:
    slots, copies = torch.tensor([[4, 7], [2, 2], [0, 0]]), torch.tensor([2, 1, 1])
    chosen = torch.tensor([10, 0, 0])
    found = route(torch.tensor([[0, 1], [0, 2], [-1, -1], [0, 1]]), slots, copies, chosen)
    assert found.tolist() == [[4, 2], [7, 0], [-1, -1], [7, 2]]
    assert chosen.tolist() == [13, 2, 1]


@pytest.mark.parametrize(("tokens", "k", "experts"), [(0, 8, 256), (1, 1, 1), (7, 8, 256), (129, 3, 10)])
def test_triton_computes_the_definition(tokens: int, k: int, experts: int) -> None:
    choices = torch.randint(-1, experts, (tokens, k), device=DEVICE)
    slots = torch.randint(500, (experts, 4), device=DEVICE)
    copies = torch.randint(1, 5, (experts,), device=DEVICE)
    before = torch.randint(9, (experts,), device=DEVICE)
    ours, theirs = before.clone(), before.clone()
    expected = reference.route(choices, slots, copies, theirs)
    assert torch.equal(triton.route(choices, slots, copies, ours), expected)
    assert torch.equal(ours, theirs)

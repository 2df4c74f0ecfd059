"""The rows of few tokens by expert, as the gate's kernel lists them: the definition."""

import torch

from kernels.moe_permute.layout import HEADER, PLAN_WIDTH, ListedRows
from kernels.moe_permute.reference import expand


def list_rows(chosen: torch.Tensor, experts: int, shared: int) -> ListedRows:
    """chosen: [tokens, k] int64, of `experts` experts, of which the `shared` last ones are shared.

    Entries that no expert has are zeros after their tokens' place, which is poisoned as unused tokens are.
    """
    placed = expand(torch.zeros(len(chosen), 1, device=chosen.device), chosen, experts)
    stops = placed.ends.tolist()
    starts = [0, *stops[:-1]]
    plan = torch.full((experts, PLAN_WIDTH), -(2**30), dtype=torch.int32)
    plan[:, :HEADER] = 0
    used = [expert for expert in range(experts) if stops[expert] > starts[expert]]
    for place, expert in enumerate(sorted(used, key=lambda each: (each < experts - shared, each))):
        tokens = (chosen == expert).any(1).nonzero().flatten()
        plan[place, :HEADER] = torch.tensor([expert, starts[expert], stops[expert], 0])
        plan[place, HEADER : HEADER + len(tokens)] = tokens
    return ListedRows(placed.positions, plan.to(chosen.device))


def assert_same_lists(found: ListedRows, expected: ListedRows) -> None:
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.plan[:, :HEADER], expected.plan[:, :HEADER])
    for entry, other in zip(found.plan.tolist(), expected.plan.tolist(), strict=True):
        end = HEADER + entry[2] - entry[1]
        assert entry[HEADER:end] == other[HEADER:end]

"""How the work of decode attention is divided, on the CPU: as the rule in Python says."""

from itertools import pairwise

import pytest
import torch

from kernels.mla_decode import plan_decode
from tests.kernels.test_mla_decode_parts import LATENT, UNIT_TOKENS, Piece, divide_into_parts, slots_of_split
from tests.support.cuda_on_cpu.launches import CudaOnCpu


# All split, some split, and none.
@pytest.mark.parametrize(
    ("requests", "longest", "processors"), [(16, 55, 132), (3, 9, 5), (40, 30, 33), (50, 40, 5), (40, 3, 70)], ids=str
)
def test_the_source_divides_as_the_rule_says(
    requests: int, longest: int, processors: int, on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = on_cpu.module("mla_decode.parts")
    monkeypatch.setattr(parts, "processors", lambda _: processors)
    for fewest in (1, longest):
        units = torch.randint(fewest, longest + 1, (requests,)).tolist()
        plan = plan_decode(torch.zeros(requests, longest).int(), torch.tensor(units).int() * UNIT_TOKENS)
        parts.divide_work(plan, 16, torch.empty(requests, 16, LATENT).bfloat16(), UNIT_TOKENS)
        made = plan.schedule.metadata
        rows = made.pieces.tolist()
        pieces = [Piece(request, first, last, None if slot < 0 else slot) for request, first, last, slot in rows]
        expected = divide_into_parts(units, processors)
        assert [pieces[begin:end] for begin, end in pairwise(made.parts.tolist())] == expected
        splits = {request: (first, end) for request, first, end, _ in made.split_requests.tolist() if first < end}
        assert splits == slots_of_split(expected)

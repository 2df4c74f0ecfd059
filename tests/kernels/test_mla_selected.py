"""Attention over selected tokens: its definition, and Triton's kernel, interpreted where there is no GPU."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest
import torch

from kernels.mla_decode import DecodePlan, plan_decode
from kernels.mla_selected import mla_selected, reference
from kernels.mla_selected import triton as ours
from kernels.top_tokens import top_tokens
from tests.support.combinations import crossed
from tests.support.selected_contexts import SCALE, SelectedContexts

Attend = Callable[[torch.Tensor, torch.Tensor, DecodePlan, torch.Tensor, int, float, float], torch.Tensor]


def backend(name: str) -> ModuleType:
    """A module that may need a GPU."""
    return import_module(f"kernels.mla_selected.{name}")


@crossed(
    attend=[reference.mla_selected, ours.mla_selected],
    lengths__query_tokens=[([1], 1), ([4, 64, 65, 200], 1), ([1, 66], 3), ([30], 40)],
    dtype__error=[(torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float8_e4m3fn, 0.01)],
    count=[1, 16, 40],
    heads__widths=[(3, (32, 40)), (20, (16, 24))],
)
def test_queries_attend_to_their_tokens_alone(
    attend: Attend,
    lengths: list[int],
    query_tokens: int,
    dtype: torch.dtype,
    error: float,
    count: int,
    heads: int,
    widths: tuple[int, int],
    device: torch.device,
    poisoned: None,
) -> None:
    case = SelectedContexts(lengths, query_tokens, count, heads, widths, dtype, device)
    found = attend(case.query, case.pool, case.plan, case.tokens, case.value_width, SCALE, case.kv_scale)
    assert case.error(found) < error


def test_the_definition_gathers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SelectedContexts([30, 90], 5, 16, 3, (32, 40), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(reference, "MOST_GATHERED", 3 * 16 * 40)
    found = mla_selected(case.query, case.pool, case.plan, case.tokens, value_width=32, scale=SCALE)
    assert case.error(found) < 1e-6


@pytest.mark.parametrize("attend", [reference.mla_selected, ours.mla_selected], ids=["reference", "triton"])
def test_no_queries_give_nothing(attend: Attend, device: torch.device) -> None:
    case = SelectedContexts([], 1, 8, 3, (32, 40), torch.float32, device)
    assert attend(case.query, case.pool, case.plan, case.tokens, 32, SCALE, 1.0).shape == (0, 3, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_cuda_forms_take_published_widths_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    for dense in ("bf16", "fp8"):
        monkeypatch.setattr(f"kernels.mla_decode.{dense}.is_hopper", lambda _: True)
    query, pool = torch.zeros(1, 16, 576, dtype=torch.bfloat16), torch.zeros(1, 64, 576).to(dtype)
    takes = backend("gathered").takes
    assert takes(query, pool, 512)
    assert not takes(query, pool, 256) and not takes(query.float(), pool, 512) and not takes(query, pool.float(), 512)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 64, 2047, 2048, 2049, 3500], [32768] * 8], ids=["ragged", "even"])
@pytest.mark.parametrize("query_tokens", [1, 2, 70])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("module", ["triton", "gathered"])
def test_two_thousand_tokens_at_published_widths(
    lengths: list[int],
    query_tokens: int,
    heads: int,
    dtype: torch.dtype,
    module: str,
    device: torch.device,
    poisoned: None,
) -> None:
    case, form = SelectedContexts(lengths, query_tokens, 2048, heads, (512, 576), dtype, device), backend(module)
    found = form.mla_selected(case.query, case.pool, case.plan, case.tokens, 512, SCALE, case.kv_scale)
    # With FP8 products queries and probabilities are rounded too.
    assert case.error(found) < (0.08 if (module, dtype) == ("gathered", torch.float8_e4m3fn) else 0.02)


@pytest.mark.gpu
def test_later_layers_reuse_the_division_of_queries(device: torch.device, poisoned: None) -> None:
    case, form = SelectedContexts([3500, 1, 700], 2, 2048, 128, (512, 576), torch.bfloat16, device), backend("gathered")
    for _ in range(3):
        found = form.mla_selected(case.query, case.pool, case.plan, case.tokens, 512, SCALE, 1.0)
        assert case.error(found) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_captured_selection_follows_its_lengths(dtype: torch.dtype, device: torch.device) -> None:
    case, graph = SelectedContexts([3500, 700, 2050], 2, 2048, 128, (512, 576), dtype, device), torch.cuda.CUDAGraph()
    table, lengths = case.plan.block_table, case.plan.lengths

    def attend() -> torch.Tensor:
        plan = plan_decode(table, lengths, query_tokens=2)
        return mla_selected(
            case.query, case.pool, plan, case.tokens, value_width=512, scale=SCALE, kv_scale=case.kv_scale
        )

    attend()
    with torch.cuda.graph(graph):
        found = attend()
    for changed in [[2, 64, 2049], [3000, 701, 65]]:
        lengths.copy_(torch.tensor(changed))
        seen = torch.stack((lengths - 1, lengths), dim=1).flatten()
        case.tokens.copy_(top_tokens(torch.randn(len(seen), 64 * table.shape[1], device=device), seen, 2048))
        found.fill_(float("nan"))
        graph.replay()
        assert case.error(found) < 0.08

"""The adapter of DeepEP, against a stand-in that computes on the CPU what the package documents."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.model import deep_ep
from engine.model.activations import Sent
from engine.model.deep_ep import DeepEp, usable
from engine.model.expert_group import ExpertGroup
from engine.parallel.layout import Layout, Place
from engine.parallel.peers import Peers
from engine.weights.loading import KeptWeights, load_model
from kernels.act_quant import Quantized, dequantize, quantize
from kernels.expert_rows import quantize_rows
from kernels.w4a8_gemm import ScaledRows
from tests.engine.model.test_expert_parallel import logits_of
from tests.support import fake_deep_ep
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.errors import relative_error
from tests.support.exchanges import CPU, exchange_of
from tests.support.int4 import int4_checkpoint
from tests.support.nvfp4 import nvfp4_checkpoint
from tests.support.rank_threads import on_each_rank

LAYOUT = Layout(dp=4, ep=4, hosts=2)
TOKENS, HIDDEN, EXPERTS, CHOICES = 5, 256, 16, 4


def in_form(rows: torch.Tensor, form: str) -> Sent:
    if form == "FP8":
        return quantize(rows)
    scale = torch.full((4,), 0.01) if form == "INT4's, static" else None
    return rows if form == "bfloat16" else quantize_rows(rows, None, scale)


def values_of(rows: Sent) -> torch.Tensor:
    if isinstance(rows, ScaledRows):
        return rows.values.float() * (rows.scales[:1] if rows.static else rows.scales).unsqueeze(1)
    return dequantize(rows) if isinstance(rows, Quantized) else rows


@pytest.mark.parametrize("form", ["bfloat16", "FP8", "INT4's", "INT4's, static"])
def test_rows_go_where_they_are_wanted_and_their_sums_come_back(form: str) -> None:
    rows = torch.randn(4 * TOKENS, HIDDEN).bfloat16()
    weights = torch.rand(4 * TOKENS, CHOICES)
    choices = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in rows])
    # Nobody wants anything of the last rank, and its experts are not wanted by the first.
    choices[:TOKENS] %= 12
    store = HashStore()

    def act(peers: Peers) -> torch.Tensor:
        rank = peers.in_worker.rank
        adapter = DeepEp(fake_deep_ep, exchange_of(peers, store), HIDDEN, EXPERTS)
        own = slice(rank * TOKENS, (rank + 1) * TOKENS)
        sent = in_form(rows[own], form)
        assert adapter.takes(sent) and not adapter.takes(rows[own].float())
        found, found_weights, numbers, way_back = adapter.dispatch(sent, weights[own], choices[own])
        here = range(rank * 4, rank * 4 + 4)
        wanted = torch.isin(choices, torch.tensor(here)).any(1)
        assert type(found) is type(sent) and torch.equal(values_of(found), values_of(in_form(rows, form))[wanted])
        mine = torch.isin(numbers, torch.tensor(here))
        assert torch.equal(numbers[mine], choices[wanted][mine])
        assert torch.equal(found_weights[mine], weights[wanted][mine])
        assert all(len(set(row)) == CHOICES for row in numbers.tolist()) and int(numbers.max()) < EXPERTS
        # As many ones as there are ranks with experts of a row.
        return adapter.combine(torch.ones(int(wanted.sum()), HIDDEN, dtype=torch.bfloat16), way_back)

    for rank, sums in enumerate(on_each_rank(LAYOUT, act)):
        asked = choices[rank * TOKENS : (rank + 1) * TOKENS] // 4
        expected = [float(len(set(row))) for row in asked.tolist()]
        assert sums.shape == (TOKENS, HIDDEN) and sums[:, 0].tolist() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float8", "int4", "nvfp4"])
def test_a_model_computes_with_it_as_exactly_as_one_rank(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    monkeypatch.setattr(deep_ep, "usable", lambda place, device: True)
    # Every expert is chosen: a choice that falls otherwise changes more than rounding does.
    sizes: dict[str, Any] = {
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 256,
        "hidden_size": 256,
    }
    if dtype == "int4":
        directory = int4_checkpoint(tmp_path, static=False, pre_scaled=True, **sizes)
    elif dtype == "nvfp4":
        directory = nvfp4_checkpoint(tmp_path, **sizes)
    else:
        directory = tiny_checkpoint(tmp_path, dtype=dtype, **sizes)
    prompt, store, before = random_prompt(70), HashStore(), fake_deep_ep.Buffer.dispatches
    exact = logits_of(load_model(directory, torch.float32, CPU), prompt)
    weights: KeptWeights = "dequantized" if dtype == "bfloat16" else "quantized"
    alone = logits_of(load_model(directory, torch.bfloat16, CPU, weights), prompt)

    def act(peers: Peers) -> torch.Tensor:
        model = load_model(directory, torch.bfloat16, CPU, weights, exchange=exchange_of(peers, store))
        return logits_of(model, prompt)

    for logits in on_each_rank(Layout(dp=2, ep=2, hosts=2), act):
        # Rows of NVFP4 experts are rounded on their way.
        assert relative_error(logits, exact) < (0.06 if dtype == "nvfp4" else 1.2 * relative_error(alone, exact))
    assert fake_deep_ep.Buffer.dispatches > before


def test_nobody_uses_it_unless_all_ranks_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep, "usable", lambda place, device: True)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    store = HashStore()

    def act(peers: Peers) -> None:
        group = ExpertGroup(exchange_of(peers, store))
        group.prepare(HIDDEN, EXPERTS, CPU)
        rows = torch.ones(1, HIDDEN).bfloat16()
        dispatched = group.begin_dispatch(rows, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)).finish()
        assert dispatched.way_back is None

    on_each_rank(Layout(dp=2, ep=2, hosts=2), act)


def test_it_is_for_hosts_of_eight_gpus_with_experts_whole() -> None:
    gpu = torch.device("cuda")
    assert usable(Place(Layout(dp=16, ep=16, hosts=2)), gpu)
    assert usable(Place(Layout(tp=8, dp=4, ep=32, hosts=4)), gpu)
    assert not usable(Place(Layout(dp=16, ep=16, hosts=2)), CPU)
    assert not usable(Place(Layout(dp=8, ep=8, hosts=2)), gpu)
    assert not usable(Place(Layout(dp=16, ep=8, hosts=2)), gpu)
    assert not usable(Place(Layout(dp=8, ep=8)), gpu)

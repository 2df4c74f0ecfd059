"""The adapter of DeepEP, against a stand-in that computes on the CPU what the package documents."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.balance.config import BalanceConfig
from engine.config import EngineConfig
from engine.exchange.alone import Alone
from engine.model.activations import Sent
from engine.model.config import parse_model_config
from engine.model.deep_ep import DeepEp, Traffic, adapter, elastic
from engine.model.deep_ep.adapter import usable
from engine.model.deep_ep.elastic import LEAST_ROOM, ElasticBuffer
from engine.model.expert_group import ExpertGroup
from engine.model.quantization import KeptWeights
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Group, Layout, Place
from engine.parallel.peers import Peers
from engine.settings.device import Hardware, resolve
from engine.weights import loading
from engine.weights.loading import load_model
from kernels.act_quant import Quantized, dequantize, quantize
from kernels.expert_rows import quantize_rows
from kernels.moe_gate import NO_EXPERT
from kernels.w4a8_gemm import ScaledRows
from tests.engine.model.test_expert_parallel import logits_of
from tests.support import fake_deep_ep
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.errors import relative_error
from tests.support.exchanges import CPU, exchange_of
from tests.support.int4 import int4_checkpoint
from tests.support.nvfp4 import nvfp4_checkpoint
from tests.support.rank_threads import on_each_rank
from tools.make_checkpoint import checkpoint_config

LAYOUT = Layout(dp=4, ep=4, hosts=2)
TOKENS, HIDDEN, EXPERTS, CHOICES = 5, 256, 16, 4
TRAFFIC = Traffic(HIDDEN, EXPERTS, CHOICES, tokens=40)
GPU = torch.device("cuda")
R1 = Traffic(hidden=7168, experts=256, choices=8, tokens=1024)


def in_form(rows: torch.Tensor, form: str) -> Sent:
    if form == "FP8":
        return quantize(rows)
    scale = torch.full((4,), 0.01) if form == "INT4's, static" else None
    return rows if form == "bfloat16" else quantize_rows(rows, None, scale)


def values_of(rows: Sent) -> torch.Tensor:
    if isinstance(rows, ScaledRows):
        return rows.values.float() * (rows.scales[:1] if rows.static else rows.scales).unsqueeze(1)
    return dequantize(rows) if isinstance(rows, Quantized) else rows


@pytest.fixture
def with_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the adapter believe that the ranks can use the package."""
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    monkeypatch.setattr(adapter, "usable", lambda layout, traffic, device: True)


@pytest.mark.parametrize("form", ["bfloat16", "FP8", "INT4's", "INT4's, static"])
@pytest.mark.parametrize("waits", [False, True])
def test_rows_reach_their_experts_and_sums_come_back(form: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "MOST_WITHOUT_WAITING", TOKENS - waits)
    rows = torch.randn(4 * TOKENS, HIDDEN).bfloat16()
    weights = torch.rand(4 * TOKENS, CHOICES)
    choices = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in rows])
    # The first rank's rows choose no expert of the last rank, and one of its rows chooses none at all.
    choices[:TOKENS] = torch.stack([torch.randperm(12)[:CHOICES] for _ in range(TOKENS)])
    choices[1] = NO_EXPERT
    store = HashStore()

    def act(peers: Peers) -> torch.Tensor:
        rank = peers.in_worker.rank
        buffer = ElasticBuffer(fake_deep_ep, exchange_of(peers, store), TRAFFIC)
        deep_ep = DeepEp(buffer, fake_deep_ep.topk_idx_t, rank * 4)
        own = slice(rank * TOKENS, (rank + 1) * TOKENS)
        sent = in_form(rows[own], form)
        assert deep_ep.takes(sent) and not deep_ep.takes(rows[own].float())
        found, found_weights, numbers, way_back = deep_ep.begin_dispatch(sent, weights[own], choices[own]).finish()
        here = torch.arange(rank * 4, rank * 4 + 4)
        wanted = torch.isin(choices, here).any(1).nonzero()[:, 0]
        came = (numbers != NO_EXPERT).any(1)
        assert type(found) is type(sent) and int(came.sum()) == len(wanted)
        # An exchange that does not wait has room for all rows.
        assert len(numbers) == (len(wanted) if waits else 4 * LEAST_ROOM)
        # Find out which of the wanted rows each arrived row is.
        same = (values_of(found)[came].unsqueeze(1) == values_of(in_form(rows, form))[wanted]).all(2)
        source = wanted[same.int().argmax(1)]
        assert same.sum(1).tolist() == [1] * len(wanted) and len(set(source.tolist())) == len(wanted)
        mine = torch.isin(choices[source], here)
        assert torch.equal(numbers[came], choices[source].where(mine, NO_EXPERT))
        assert torch.equal(found_weights[came][mine], weights[source][mine])
        # The sum of a row is then the number of ranks with experts of the row.
        parts = torch.full((len(numbers), HIDDEN), float("nan"), dtype=torch.bfloat16)
        parts[came] = 1
        return deep_ep.begin_combine(parts, way_back).finish()

    for rank, sums in enumerate(on_each_rank(LAYOUT, act)):
        asked = choices[rank * TOKENS : (rank + 1) * TOKENS].tolist()
        expected = [float(len({choice // 4 for choice in row if choice != NO_EXPERT})) for row in asked]
        assert sums.shape == (TOKENS, HIDDEN) and sums[:, 0].tolist() == expected


@pytest.mark.usefixtures("with_package")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8", "int4", "nvfp4"])
def test_a_model_computes_with_it_as_exactly_as_one_rank(dtype: str, tmp_path: Path) -> None:
    # Every expert is chosen, because a different choice would change more than rounding does.
    sizes: dict[str, Any] = {
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 256,
        "hidden_size": 256,
        "num_hidden_layers": 2,
    }
    if dtype == "int4":
        directory = int4_checkpoint(tmp_path, static=False, pre_scaled=True, **sizes)
    elif dtype == "nvfp4":
        directory = nvfp4_checkpoint(tmp_path, **sizes)
    else:
        directory = tiny_checkpoint(tmp_path, dtype=dtype, **sizes)
    prompt, store, before = random_prompt(70), HashStore(), fake_deep_ep.ElasticBuffer.dispatches
    exact = logits_of(load_model(directory, torch.float32, CPU), prompt)
    weights: KeptWeights = "dequantized" if dtype == "bfloat16" else "quantized"
    alone = logits_of(load_model(directory, torch.bfloat16, CPU, weights), prompt)

    def act(peers: Peers) -> torch.Tensor:
        model = load_model(directory, torch.bfloat16, CPU, weights, exchange=exchange_of(peers, store))
        return logits_of(model, prompt)

    for logits in on_each_rank(Layout(dp=2, ep=2, hosts=2), act):
        # The exchange rounds rows of NVFP4 experts.
        assert relative_error(logits, exact) < (0.06 if dtype == "nvfp4" else 1.2 * relative_error(alone, exact))
    assert fake_deep_ep.ElasticBuffer.dispatches > before


@pytest.mark.usefixtures("with_package")
@pytest.mark.parametrize(("packages", "uses"), [("none", False), ("one", False), ("both", True)])
def test_ranks_use_it_if_all_have_it(packages: str, uses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([None if packages == "none" else fake_deep_ep, fake_deep_ep if packages == "both" else None])
    monkeypatch.setattr(adapter, "find_package", lambda name, needs: next(found))
    store = HashStore()

    def act(peers: Peers) -> bool:
        return adapter.find_deep_ep(exchange_of(peers, store), TRAFFIC, CPU) is not None

    assert on_each_rank(Layout(dp=2, ep=2, hosts=2), act) == [uses, uses]


@pytest.mark.usefixtures("with_package")
@pytest.mark.parametrize("experts", [8, 9], ids=["divided", "with a copy"])
def test_ranks_load_without_it_next_to_a_kept_model(experts: int, tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, n_routed_experts=experts, n_group=1, topk_group=1)
    config = EngineConfig(model_dir=directory, device="cpu", parallel=ParallelConfig(dp=2, hosts=2))
    resolved, store = resolve(config, Hardware(0, 1 << 30)), HashStore()
    kept = loading.load_model(directory, torch.float32, CPU)

    def act(peers: Peers) -> tuple[bool, list[int]]:
        exchange, model = exchange_of(peers, store), kept
        if peers.in_worker.rank == 0:
            loading.join_loading(resolved, model, exchange)
        else:
            model = loading.make_model(resolved, exchange)
        # They are at the same call.
        met = exchange.all_gather(torch.tensor([peers.in_worker.rank]), Group.WORLD)
        return model.expert_group.uses_deep_ep, met.tolist()

    assert on_each_rank(Layout(dp=2, ep=2, hosts=2), act) == [(False, [0, 1])] * 2


@pytest.mark.usefixtures("with_package")
def test_parts_of_a_step_compute_while_rows_travel() -> None:
    store = HashStore()

    def act(peers: Peers) -> list[str]:
        exchange = exchange_of(peers, store)
        group = ExpertGroup(exchange, adapter.find_deep_ep(exchange, TRAFFIC, CPU))
        rows, choices, seen = torch.ones(1, HIDDEN).bfloat16(), torch.arange(CHOICES)[None], []

        def part() -> None:
            begun = group.begin_dispatch(rows, torch.ones(1, CHOICES), choices)
            seen.append("sent")
            assert begun.finish().way_back is not None
            seen.append("arrived")

        group.turns.take([part, part])
        return seen

    assert on_each_rank(Layout(dp=2, ep=2, hosts=2), act) == [["sent", "sent", "arrived", "arrived"]] * 2


def test_few_rows_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_is_captured", lambda rows: True)
    store = HashStore()

    def act(peers: Peers) -> list[bool]:
        deep_ep = DeepEp(ElasticBuffer(fake_deep_ep, exchange_of(peers, store), R1), torch.int64, 0)
        return [deep_ep.takes(torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)) for tokens in (1, 256, 257)]

    assert on_each_rank(Layout(dp=2, ep=2, hosts=2), act) == [[True, True, False]] * 2


@pytest.mark.parametrize(
    ("layout", "traffic", "device", "expected"),
    [
        pytest.param(Layout(dp=8, ep=8, hosts=2), R1, GPU, True, id="two hosts of four"),
        pytest.param(Layout(tp=8, dp=4, ep=32, hosts=4), R1, GPU, True, id="four hosts of eight"),
        pytest.param(Layout(dp=2, ep=2, hosts=2), R1, GPU, False, id="128 experts on a rank"),
        pytest.param(Layout(dp=8, ep=8, hosts=2), replace(R1, hidden=7296), GPU, False, id="rows of odd bytes"),
        pytest.param(Layout(dp=16, ep=16, hosts=2), R1, CPU, False, id="a CPU"),
        pytest.param(Layout(dp=16, ep=8, hosts=2), R1, GPU, False, id="divided experts"),
        pytest.param(Layout(dp=8, ep=8), R1, GPU, False, id="one host"),
    ],
)
def test_it_is_for_whole_experts_on_gpus_of_several_hosts(
    layout: Layout, traffic: Traffic, device: torch.device, expected: bool
) -> None:
    assert usable(layout, traffic, device) is expected


@pytest.mark.parametrize(
    ("redundant", "draft_layers", "experts"),
    [(0, 1, 8), (2, 0, 12), (2, 1, None)],
    ids=["no copies", "copies, no drafts", "copies, but not of the drafts'"],
)
def test_a_buffer_is_made_for_one_number_of_experts(
    redundant: int, draft_layers: int, experts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int | None] = []
    monkeypatch.setattr(loading, "find_deep_ep", lambda exchange, traffic, device: made.append(traffic.experts))
    described = checkpoint_config("tiny", overrides={"n_routed_experts": 8, "num_nextn_predict_layers": 1})
    config = replace(parse_model_config(described), draft_layers=draft_layers)
    exchange = Alone(Place(Layout(dp=2, ep=2, hosts=2)))
    loading.make_allocator(
        config, torch.float32, CPU, "quantized", exchange, balance=BalanceConfig(interval_steps=16, redundant=redundant)
    )
    assert made == ([] if experts is None else [experts])

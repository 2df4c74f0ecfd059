"""Experts that move between ranks: in models of every format, and while tokens are computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from transformers import DeepseekV3ForCausalLM

from engine.balance.config import BalanceConfig
from engine.balance.placement import first_placement
from engine.balance.placements import first_placements, grouping_of
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.exchange.host import HostExchange
from engine.model.config import read_model_config
from engine.model.model import Model
from engine.model.quantization import KeptWeights
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.runner.balancer import Balancer
from engine.weights.loading import load_model
from kernels.moe_gate import NO_EXPERT
from mesh.errors import ConfigError
from tests.support.checkpoints import random_prompt, rewrite_as_one_file, tiny_checkpoint
from tests.support.engines import Transcript, submit_of
from tests.support.exchanges import exchange_of
from tests.support.int4 import WIDE, int4_checkpoint
from tests.support.layouts import run_layout
from tests.support.nvfp4 import nvfp4_checkpoint
from tests.support.oracle_model import assert_greedy, load_oracle
from tests.support.rank_threads import on_each_rank

CPU = torch.device("cpu")
INTERVAL = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return load_oracle(checkpoint)


def loads_of(layer: int, turn: int, experts: int = 8) -> torch.Tensor:
    """Skewed loads, which differ by layer and turn."""
    return torch.tensor([100 // (1 + (expert * 3 + layer + 5 * turn) % experts) for expert in range(experts)])


def moved_model(
    peers: Peers, store: HashStore, directory: Path, weights: KeptWeights, config: BalanceConfig, turns: int
) -> Model:
    """A model whose experts have moved for loads that changed this many times."""
    exchange = exchange_of(peers, store)
    dtype = torch.bfloat16 if weights == "quantized" else torch.float32
    model = load_model(directory, dtype, CPU, weights, exchange=exchange, balance=config)
    layers = model.balanced_layers()
    balancer = Balancer(layers, exchange, config, model.config.n_group)
    for step in range(turns * 20 * INTERVAL):
        if step % (20 * INTERVAL) == 0:
            for index, layer in layers.items():
                # Only one rank counts loads; the others learn of them from it.
                if peers.in_worker.rank == 1:
                    loads = loads_of(index, step)
                    layer.slots.route(torch.arange(8).repeat_interleave(loads).unsqueeze(1))
        balancer.before_step()
    assert turns == 0 or (balancer.report is not None and balancer.report.moved > 0)
    return model


@pytest.mark.parametrize(("rows", "moves"), [(100, True), (1, False)])
def test_experts_move_within_the_first_hundred_steps(checkpoint: Path, rows: int, moves: bool) -> None:
    """rows: how often the most chosen expert is. Few choices are chance."""
    config = BalanceConfig(interval_steps=1000)

    def moved(peers: Peers) -> bool:
        exchange = HostExchange(peers)
        model = load_model(checkpoint, torch.float32, CPU, "dequantized", exchange=exchange, balance=config)
        layers = model.balanced_layers()
        balancer = Balancer(layers, exchange, config, model.config.n_group)
        for index, layer in layers.items():
            loads = loads_of(index, 0) * rows // 100
            layer.slots.route(torch.arange(8).repeat_interleave(loads).unsqueeze(1))
        for _ in range(100):
            balancer.before_step()
        return balancer.report is not None and balancer.report.moved > 0

    assert on_each_rank(Layout(dp=2, ep=2), moved) == [moves, moves]


@pytest.mark.parametrize(
    ("layout", "form", "redundant", "grouped"),
    [
        (Layout(dp=2, ep=2), "float32", 2, False),
        (Layout(tp=2, dp=2, ep=2), "float32", 0, False),
        (Layout(dp=4, ep=4, hosts=2), "float32", 1, True),
        (Layout(dp=4, ep=4, hosts=2), "float32", 1, False),
        (Layout(dp=3, ep=3), "float32", 0, False),
        (Layout(dp=2, ep=2), "float8", 2, False),
        (Layout(dp=2, ep=2), "int4", 0, False),
        (Layout(dp=2, ep=2), "nvfp4", 2, False),
    ],
)
def test_moved_experts_equal_those_loaded_in_place(
    tmp_path: Path, layout: Layout, form: str, redundant: int, grouped: bool
) -> None:
    directory = tmp_path / "model"
    few: dict[str, Any] = {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    if form == "int4":
        int4_checkpoint(directory, static=True, pre_scaled=True, **few)
    elif form == "nvfp4":
        nvfp4_checkpoint(directory, **few)
    else:
        tiny_checkpoint(directory, dtype=form, **(WIDE if form == "float8" else {}), **few)
    weights: KeptWeights = "dequantized" if form == "float32" else "quantized"
    path = tmp_path / "placement.json"
    config = BalanceConfig(
        interval_steps=INTERVAL, redundant=redundant, threshold=0.02, placement_file=path, groups_on_hosts=grouped
    )

    def after(turns: int) -> list[Model]:
        store = HashStore()
        return on_each_rank(layout, lambda peers: moved_model(peers, store, directory, weights, config, turns), 60.0)

    moved = after(2)
    assert path.exists()
    loaded = after(0)
    for ours, theirs in zip(moved, loaded, strict=True):
        for index, layer in ours.balanced_layers().items():
            other = theirs.balanced_layers()[index]
            assert layer.slots.placement == other.slots.placement
            for tensor, expected in zip(layer.weights, other.weights, strict=True):
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    first = first_placement(8, layout.ep, redundant, grouping_of(config, layout, 4))
    assert any(layer.slots.placement != first for layer in moved[0].balanced_layers().values())


@pytest.mark.parametrize(
    ("parallel", "redundant"),
    [
        (ParallelConfig(dp=2, ep=2), 1),
        (ParallelConfig(dp=2, ep=2, two_batch="on"), 1),
        (ParallelConfig(dp=3, ep=3), 0),
        (ParallelConfig(dp=4, ep=4, hosts=2), 1),
        pytest.param(ParallelConfig(dp=2, ep=2), 0, marks=pytest.mark.check("layouts")),
        pytest.param(ParallelConfig(dp=4, ep=2), 2, marks=pytest.mark.check("layouts")),
        pytest.param(ParallelConfig(dp=6, hosts=2), 0, marks=pytest.mark.check("hosts")),
        pytest.param(ParallelConfig(tp=2, dp=2, ep=2, hosts=2), 1, marks=pytest.mark.check("hosts")),
        pytest.param(ParallelConfig(tp=2, dp=2, ep=4), 3, marks=pytest.mark.check("layouts")),
        pytest.param(ParallelConfig(tp=2, dp=2, ep=4, two_batch="on"), 3, marks=pytest.mark.check("layouts")),
    ],
)
def test_tokens_are_those_of_transformers_while_experts_move(
    checkpoint: Path, reference: DeepseekV3ForCausalLM, parallel: ParallelConfig, redundant: int
) -> None:
    balance = BalanceConfig(interval_steps=INTERVAL, redundant=redundant, threshold=0.01)
    config = EngineConfig(
        model_dir=checkpoint, device="cpu", parallel=parallel, balance=balance, max_step_tokens=96, max_requests=8,
        total_blocks=64, threads=1,
    )  # fmt: skip
    prompts = [random_prompt(length, seed=length) for length in (1, 63, 65, 130)]
    submits = [submit_of(key, prompt, 30, ignore_eos=True) for key, prompt in enumerate(prompts)]
    moved: list[int] = []

    def between_steps(engine: Engine, transcript: Transcript) -> None:
        report = vars(engine)["_backend"].balance
        moved.append(0 if report is None else report.moved)

    transcript = run_layout(config, submits, between_steps)
    assert max(moved) > 0
    for key, prompt in enumerate(prompts):
        assert_greedy(reference, prompt, transcript.token_ids[key])


def test_padding_is_not_counted(checkpoint: Path) -> None:
    config = BalanceConfig(interval_steps=INTERVAL)

    def count(peers: Peers) -> list[int]:
        model = load_model(checkpoint, torch.float32, CPU, exchange=HostExchange(peers), balance=config)
        (layer, *_) = model.balanced_layers().values()
        layer.slots.route(torch.tensor([[0, 1], [1, 2], [NO_EXPERT, NO_EXPERT]]))
        return list(layer.slots.chosen.tolist())

    for counted in on_each_rank(Layout(dp=2, ep=2), count):
        assert counted == [1, 2, 1, 0, 0, 0, 0, 0]


def test_a_rank_is_ready_for_int4_experts_of_other_ranks(tmp_path: Path) -> None:
    directory = int4_checkpoint(tmp_path, num_hidden_layers=2)

    def lower(tensors: dict[str, torch.Tensor]) -> None:
        # One matrix of the first rank has weights of -8, which need another kernel.
        tensors["model.layers.1.mlp.experts.0.down_proj.weight"].fill_(0x88 - 256)

    rewrite_as_one_file(directory, lower)

    def minima(peers: Peers) -> list[bool]:
        config = BalanceConfig(interval_steps=INTERVAL)
        model = load_model(directory, torch.bfloat16, CPU, "quantized", exchange=HostExchange(peers), balance=config)
        experts = vars(model.layers[1].feed_forward)["experts"]
        return [vars(experts)[name].weight.has_minimum for name in ("_gate_up", "_down")]

    assert on_each_rank(Layout(dp=2, ep=2), minima) == [[False, True]] * 2


def test_what_was_chosen_before_requests_came_moves_nothing(checkpoint: Path) -> None:
    config = BalanceConfig(interval_steps=INTERVAL, threshold=0.02)

    def serve(peers: Peers) -> float:
        exchange = HostExchange(peers)
        model = load_model(checkpoint, torch.float32, CPU, exchange=exchange, balance=config)
        layers = model.balanced_layers()
        for layer in layers.values():
            layer.slots.route(torch.zeros(100, 1, dtype=torch.int64))
        balancer = Balancer(layers, exchange, config, model.config.n_group)
        for _ in range(2 * INTERVAL):
            balancer.before_step()
        assert balancer.report is not None
        return balancer.report.largest_imbalance

    assert on_each_rank(Layout(dp=2, ep=2), serve) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("[", "cannot be read"),
        ('{"1": [0, 1, 2]}', "places layer 1 otherwise"),
        ('{"1": [0,0,1,2,3,4,5,6]}', "layer 1"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path, saved: str, message: str) -> None:
    path = tmp_path / "placement.json"
    path.write_text(saved)

    def load(peers: Peers) -> str:
        with pytest.raises(ConfigError, match=message) as caught:
            load_model(
                checkpoint, torch.float32, CPU, exchange=HostExchange(peers), balance=BalanceConfig(placement_file=path)
            )
        return caught.value.message

    on_each_rank(Layout(dp=2, ep=2), load)


def test_ranks_that_find_other_placements_take_the_first_ones(checkpoint: Path, tmp_path: Path) -> None:
    for rank, held in enumerate(([7, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 7, 5, 6, 4])):
        (tmp_path / f"{rank}.json").write_text(json.dumps({"1": held}))

    def load(peers: Peers) -> tuple[int, ...]:
        config = BalanceConfig(placement_file=tmp_path / f"{peers.place.rank}.json")
        model = load_model(checkpoint, torch.float32, CPU, exchange=HostExchange(peers), balance=config)
        return model.balanced_layers()[1].slots.placement.experts

    assert on_each_rank(Layout(dp=2, ep=2), load) == [(7, 1, 2, 3, 4, 5, 6, 0)] * 2


def test_experts_move_on_though_their_placement_cannot_be_saved(checkpoint: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "placement.json"
    config = BalanceConfig(interval_steps=INTERVAL, threshold=0.02, placement_file=nowhere)
    store = HashStore()
    on_each_rank(
        Layout(dp=2, ep=2), lambda peers: moved_model(peers, store, checkpoint, "dequantized", config, 2), 60.0
    )
    assert not nowhere.exists()


@pytest.mark.parametrize(
    ("layout", "redundant", "cause"),
    [
        (Layout(dp=2, ep=2), 5, "a part has 4 of the 8 experts, so there is room for at most 4 copies"),
        (Layout(dp=4, ep=4, hosts=2), 3, "a part has 2 of the 4 experts of its host, .* at most 2 copies"),
        (Layout(dp=3, ep=3), 6, "a part has 3 of the 8 experts, .* at most 5 copies"),
    ],
)
def test_more_copies_than_there_are_experts_elsewhere_are_refused(
    checkpoint: Path, layout: Layout, redundant: int, cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause):
        config = BalanceConfig(redundant=redundant, groups_on_hosts=True)
        first_placements(config, layout, read_model_config(checkpoint))


def test_layers_that_draft_have_copies_if_experts_do_not_divide(checkpoint: Path) -> None:
    model = replace(read_model_config(checkpoint), draft_layers=1)
    config = BalanceConfig(redundant=1)
    assert set(first_placements(config, Layout(dp=2, ep=2), model)) == {1, 2}
    placed = first_placements(config, Layout(dp=3, ep=3), model)
    assert {layer: placement.slots for layer, placement in placed.items()} == {1: 4, 2: 4, 3: 3}


def test_drafts_are_right_where_experts_do_not_divide(checkpoint: Path, reference: DeepseekV3ForCausalLM) -> None:
    config = EngineConfig(
        model_dir=checkpoint, device="cpu", parallel=ParallelConfig(dp=3), drafts=DraftsConfig(next_n=1), threads=1,
        max_step_tokens=96, max_requests=8, total_blocks=64,
    )  # fmt: skip
    prompts = [random_prompt(length, seed=length) for length in (1, 63, 70)]
    submits = [submit_of(key, prompt, 12, ignore_eos=True) for key, prompt in enumerate(prompts)]
    transcript = run_layout(config, submits)
    for key, prompt in enumerate(prompts):
        assert_greedy(reference, prompt, transcript.token_ids[key])

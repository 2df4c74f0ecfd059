"""A model whose routed experts are divided over ranks against the same model whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Row
from engine.exchange.host import HostExchange
from engine.model import moe
from engine.model.inputs import build_context
from engine.model.model import Model
from engine.model.parameters import Parameter, merged_shape
from engine.model.quantization import KeptWeights
from engine.model.share import check_experts
from engine.model.state import make_state
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.weights.loading import load_model
from mesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import GREEDY, random_prompt, rewrite_as_one_file, tiny_checkpoint
from tests.support.errors import relative_error
from tests.support.int4 import int4_checkpoint
from tests.support.nvfp4 import WITH_OUTPUT, nvfp4_checkpoint
from tests.support.packed import packed_checkpoint
from tests.support.rank_threads import on_each_rank

CPU = torch.device("cpu")
# Ranks have whole experts, or parts of the experts' width, or both.
LAYOUTS = [Layout(dp=2, ep=2), Layout(dp=2, ep=1), Layout(dp=4, ep=2), Layout(tp=2, dp=2, ep=4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@torch.inference_mode()
def logits_of(model: Model, prompt: list[int]) -> torch.Tensor:
    state = make_state(model.config, CPU, blocks=4, positions=len(prompt), rows=1, kv_dtype=model.dtype)
    return model.forward(build_context(model.config, [Row(prompt, 0, range(4), GREEDY)], state))


def divided(directory: Path, dtype: torch.dtype, weights: KeptWeights = "dequantized") -> Callable[[Peers], Model]:
    return lambda peers: load_model(directory, dtype, CPU, weights, exchange=HostExchange(peers))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_dp_rank_gets_the_logits_of_its_own_rows(checkpoint: Path, layout: Layout) -> None:
    prompts = [random_prompt(70, seed) for seed in range(layout.dp)]
    whole = load_model(checkpoint, torch.float32, CPU)
    expected = [logits_of(whole, prompt) for prompt in prompts]

    def compute(peers: Peers) -> torch.Tensor:
        return logits_of(divided(checkpoint, torch.float32)(peers), prompts[peers.place.dp_index])

    for rank, logits in enumerate(on_each_rank(layout, compute)):
        assert relative_error(logits, expected[rank // layout.tp]) < 1e-5


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("float8", Layout(dp=2, ep=2)),
        ("float8", Layout(dp=4, ep=2)),
        ("int4", Layout(dp=4, ep=2)),
        ("nvfp4", Layout(dp=4, ep=2)),
    ],
    ids=str,
)
def test_ranks_with_quantized_experts_are_as_exact_as_one(tmp_path: Path, form: str, layout: Layout) -> None:
    # Every expert is chosen, because a different choice would change more than rounding does.
    all_chosen: dict[str, Any] = {
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    if form == "int4":
        directory = int4_checkpoint(tmp_path, static=True, pre_scaled=True, **all_chosen)
    elif form == "nvfp4":
        directory = nvfp4_checkpoint(tmp_path, quantized=WITH_OUTPUT, num_nextn_predict_layers=0, **all_chosen)
    else:
        directory = tiny_checkpoint(tmp_path, dtype="float8", hidden_size=256, **all_chosen)
    prompt = random_prompt(70)
    exact = logits_of(load_model(directory, torch.float32, CPU), prompt)
    alone = logits_of(load_model(directory, torch.bfloat16, CPU, "quantized"), prompt)
    ranks = on_each_rank(
        layout, lambda peers: logits_of(divided(directory, torch.bfloat16, "quantized")(peers), prompt)
    )
    # With NVFP4 no activation is rounded to FP8. Only bfloat16's rounding is left, which differs with the order of
    # sums.
    bound = 1.5 if form == "nvfp4" else 1.2
    for logits in ranks:
        assert relative_error(logits, exact) < bound * relative_error(alone, exact)


def test_steps_that_are_computed_in_parts_get_the_same_logits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(70)
    expected = logits_of(load_model(checkpoint, torch.float32, CPU), prompt)
    monkeypatch.setattr(moe, "CHUNK_TOKENS", 32)
    found = on_each_rank(Layout(dp=2, ep=2), lambda peers: logits_of(divided(checkpoint, torch.float32)(peers), prompt))
    assert all(relative_error(logits, expected) < 1e-5 for logits in found)


def test_fp8_rows_travel_in_parts_as_they_do_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, prompt = (
        tiny_checkpoint(tmp_path, dtype="float8", hidden_size=256, moe_intermediate_size=256),
        random_prompt(70),
    )

    def compute(peers: Peers) -> torch.Tensor:
        return logits_of(divided(directory, torch.bfloat16, "quantized")(peers), prompt)

    expected = on_each_rank(Layout(dp=2, ep=2), compute)
    monkeypatch.setattr(moe, "CHUNK_TOKENS", 32)
    found = on_each_rank(Layout(dp=2, ep=2), compute)
    assert all(relative_error(*each) < 1e-2 for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_ranks_hold_each_part_of_each_expert_once(checkpoint: Path, layout: Layout) -> None:
    assert_parts(checkpoint, layout, torch.float32, "dequantized")


@pytest.mark.parametrize("weights", ["dequantized", "quantized"])
@pytest.mark.parametrize("form", ["float8", "int4", "groups of 32", "nvfp4"])
def test_parts_of_quantized_experts_consist_of_their_blocks(tmp_path: Path, weights: KeptWeights, form: str) -> None:
    sizes: dict[str, Any] = {"moe_intermediate_size": 256, "num_hidden_layers": 2}
    if form == "int4":
        directory = int4_checkpoint(tmp_path, static=True, pre_scaled=True, **sizes)
    elif form == "groups of 32":
        directory, _ = packed_checkpoint(tmp_path, "compressed-tensors", hidden_size=256, **sizes)
    elif form == "nvfp4":
        directory = nvfp4_checkpoint(tmp_path, num_nextn_predict_layers=0, **sizes)
    else:
        directory = tiny_checkpoint(tmp_path, dtype="float8", hidden_size=256, **sizes)
    assert_parts(directory, Layout(dp=4, ep=2), torch.bfloat16, weights)


def assert_parts(directory: Path, layout: Layout, dtype: torch.dtype, weights: KeptWeights) -> None:
    expected = {each.name: each for each in load_model(directory, dtype, CPU, weights).parameters()}
    ranks = on_each_rank(layout, lambda peers: list(divided(directory, dtype, weights)(peers).parameters()))
    covered = {name: torch.zeros(each.shape, dtype=torch.int8) for name, each in expected.items()}
    for rank in ranks:
        for each in rank:
            assert each.shape == expected[each.name].shape
            # Tensors of four dimensions are packed in an order that differs between a part and the whole.
            if each.place.dim() < 4:
                assert torch.equal(matrix(each).float(), matrix(expected[each.name]).float()[each.slices])
            covered[each.name][each.slices] += 1
    for name, counts in covered.items():
        once = (
            ".experts." in name
            and ".experts.pre_quant" not in name
            and not name.endswith(("input_scale", "weight_scale_2"))
        )
        assert (counts == (1 if once else counts.max())).all() and counts.all()


def matrix(parameter: Parameter) -> torch.Tensor:
    return parameter.place.reshape(merged_shape(parameter.place))


def test_a_checkpoint_that_lacks_another_ranks_expert_is_refused(tmp_path: Path) -> None:
    missing = "model.layers.1.mlp.experts.7.up_proj.weight"
    rewrite_as_one_file(tiny_checkpoint(tmp_path), lambda tensors: tensors.pop(missing))

    def load(peers: Peers) -> str:
        with pytest.raises(CheckpointError) as refused:
            divided(tmp_path, torch.float32)(peers)
        return refused.value.message

    assert all(missing in message for message in on_each_rank(Layout(dp=2, ep=2), load))


@pytest.mark.parametrize(
    ("layout", "blocks", "cause"),
    [
        (
            Layout(dp=3, ep=1),
            False,
            "ep=1 on 3 ranks cuts the experts' width of 64 into 3 parts, which cannot be equal",
        ),
        (Layout(dp=2, ep=1), True, "ep=1 on 2 ranks cuts the experts' width of 64 into 2 parts, within a block of 128"),
    ],
)
def test_experts_that_do_not_divide_are_refused(checkpoint: Path, layout: Layout, blocks: bool, cause: str) -> None:
    config = load_model(checkpoint, torch.float32, CPU).config
    check_experts(config, Layout(dp=2, ep=2), blocks=True)
    with pytest.raises(ConfigError, match=f"engine.parallel.{cause}"):
        check_experts(config, layout, blocks=blocks)

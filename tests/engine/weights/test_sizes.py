"""The memory that a rank's weights will take, computed before they exist."""

from pathlib import Path

import pytest
import torch

from capacity.shapes import DEEPSEEK_R1
from engine.exchange.alone import Alone
from engine.model.config import parse_model_config, read_model_config
from engine.parallel.layout import Layout, Place
from engine.weights.loading import make_allocator
from engine.weights.sizes import Sizes, sizes_of
from tests.support.checkpoints import read_tensors, tiny_checkpoint

R1_CUT = {**DEEPSEEK_R1, "num_hidden_layers": 5}
SHARED_EXPERT = 3 * 7168 * 2048


def sizes_on(layout: Layout) -> Sizes:
    config = parse_model_config(R1_CUT)
    exchange = Alone(Place(layout))
    return sizes_of(config, make_allocator(config, torch.bfloat16, torch.device("meta"), "quantized", exchange))


def test_a_model_kept_as_published_takes_its_files_size(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    config = read_model_config(directory)
    sizes = sizes_of(config, make_allocator(config, torch.float32, torch.device("meta"), "dequantized"))
    drafts = f"model.layers.{config.num_hidden_layers}."
    published = read_tensors(directory)
    assert sizes.weights == sum(each.nbytes for name, each in published.items() if not name.startswith(drafts))


def test_dp_ranks_divide_experts_alone_and_tp_ranks_the_rest() -> None:
    whole, four = sizes_on(Layout()), sizes_on(Layout(dp=4, ep=4))
    apart = sizes_on(Layout(dp=2, ep=2))
    # Two layers have experts. On a single rank the shared experts count among them.
    assert apart.weights - four.weights == 2 * (apart.layer_experts - four.layer_experts)
    assert four.layer_experts == pytest.approx(whole.layer_experts * 256 / 257 / 4)


def test_a_rank_of_one_tp_group_holds_shared_experts_twice() -> None:
    alone, beside_another = sizes_on(Layout(tp=4, ep=4)), sizes_on(Layout(tp=4, dp=2, ep=8))
    without_routed = [sizes.weights - 2 * sizes.layer_experts for sizes in (alone, beside_another)]
    assert without_routed[0] - without_routed[1] == pytest.approx(2 * SHARED_EXPERT / 4, rel=1e-3)

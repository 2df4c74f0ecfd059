"""`scale_fmt: ue8m0`: every product in FP8 gets activations whose scales are powers of two."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.exchange.host import HostExchange
from engine.exchange.interface import RankExchange
from engine.parallel.layout import Layout as Ranks
from kernels.act_quant import Quantized
from kernels.fp8_gemm import BlockScaled, Workspace
from kernels.moe_permute.layout import Layout
from tests.support.checkpoints import edit_config, random_prompt, tiny_checkpoint
from tests.support.oracle_model import our_logits
from tests.support.rank_threads import on_each_rank

# Widths that FP8 blocks divide, also those of two ranks' shares and of keys and values that are expanded.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "kv_lora_rank": 128,
    "moe_intermediate_size": 256,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
# Where a layer's module has its product.
PRODUCTS = [
    "engine.model.formats.block_fp8.fp8_gemm",
    "engine.model.formats.block_fp8.grouped_fp8_gemm",
    "engine.model.expansion.fp8_gemm",
]
Scales = dict[str, list[torch.Tensor]]


def checkpoint(directory: Path, *, powers: bool) -> Path:
    tiny_checkpoint(directory, dtype="float8", **SIZES)
    section = json.loads((directory / "config.json").read_text())["quantization_config"]
    if powers:
        edit_config(directory, quantization_config=section | {"scale_fmt": "ue8m0"})
    return directory


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch) -> Scales:
    """The scales of what each product has been given."""
    found: Scales = defaultdict(list)

    def recording(name: str, multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def record(x: Quantized, weight: BlockScaled, layout: Workspace | Layout) -> torch.Tensor:
            scales = x.scales.flatten(0, -2)
            if not isinstance(layout, Workspace):
                # Other rows belong to no token.
                scales = scales[layout.positions[layout.positions >= 0]]
            found[name].append(scales.clone())
            return multiply(x, weight, layout)

        return record

    for path in PRODUCTS:
        module, _, name = path.rpartition(".")
        multiply = getattr(__import__(module, fromlist=[name]), name)
        monkeypatch.setattr(path, recording(path, multiply))
    return found


def compute(directory: Path, exchange: RankExchange | None = None) -> torch.Tensor:
    """A prompt in two chunks, then two tokens alone."""
    chunks = [40, 20, 1, 1]
    return our_logits(
        directory, random_prompt(62), [3], chunks, dtype=torch.bfloat16, weights="quantized", exchange=exchange
    )


def are_powers(scales: torch.Tensor) -> bool:
    # The mantissa of a power of two is a half.
    return bool(scales.frexp().mantissa.eq(0.5).all())


@pytest.mark.parametrize("powers", [False, True])
def test_scales_are_powers_where_config_json_asks(powers: bool, tmp_path: Path, scales: Scales) -> None:
    compute(checkpoint(tmp_path, powers=powers))
    assert set(scales) == set(PRODUCTS)
    assert all(are_powers(each) == powers for found in scales.values() for each in found)


def test_ranks_that_divide_a_model_ask_for_powers_too(tmp_path: Path, scales: Scales) -> None:
    directory = checkpoint(tmp_path, powers=True)
    on_each_rank(Ranks(tp=2, ep=2), lambda peers: compute(directory, HostExchange(peers)))
    assert {*PRODUCTS[:2]} <= set(scales)
    assert all(are_powers(each) for found in scales.values() for each in found)

"""Prompts that attend to selected tokens among expanded keys, by a mask."""

import json
from pathlib import Path

import pytest
import torch

from engine.batch import Row
from engine.model import indexed_rows, inputs, prompt_forms, state
from engine.model.config import ModelConfig, parse_model_config
from engine.model.masked_rows import masked_is_cheaper, masked_until
from engine.model.quantization import KeptWeights
from tests.support.checkpoints import GREEDY, random_prompt, tiny_checkpoint
from tests.support.family import FAMILY
from tests.support.oracle_model import load_oracle_of_family, oracle_logits, our_logits, relative_error
from tools.make_checkpoint import checkpoint_config, make_checkpoint

BLOCKS = [5, 2, 9]
V32 = FAMILY["deepseek-v3.2"]
# DeepSeek's own widths per head, which have kernels made for them.
PUBLISHED_HEADS = {
    "hidden_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "index_head_dim": 128,
}


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks for all tokens up to position 100 that select, whatever they cost; tiny prompts are cheaper without."""
    monkeypatch.setattr(state, "masked_until", lambda *_: 100)
    monkeypatch.setattr(prompt_forms, "masked_is_cheaper", lambda *_, **__: True)


def published() -> ModelConfig:
    return parse_model_config(json.loads((Path(__file__).parent / "published" / "deepseek-v3.2.json").read_text()))


def test_selected_latents_take_as_long_as_7000_expanded_keys() -> None:
    assert masked_until(published(), torch.bfloat16, torch.device("cpu")) == 2048 * (576 + 512) // (192 + 128) == 6963


@pytest.mark.parametrize(
    ("queries", "context", "masked"),
    [(1452, 3500, True), (4915, 6963, True), (500, 6963, False), (1, 2100, False), (300, 2400, True)],
)
def test_masks_pay_for_expanding_the_prefix_if_queries_are_many(queries: int, context: int, masked: bool) -> None:
    assert masked_is_cheaper(published(), queries=queries, context=context) == masked


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize(("fp8", "first"), [(False, 0), (True, V32["index_topk"])])
def test_masked_rows_begin_with_the_prompt_unless_it_is_fp8(fp8: bool, first: int) -> None:
    config = parse_model_config(checkpoint_config("tiny", overrides=V32))
    of_pool = state.make_state(
        config, torch.device("cpu"), blocks=10, positions=130, rows=1, kv_dtype=torch.bfloat16, quantized_prompts=fp8
    )
    context = inputs.build_context(config, [Row(random_prompt(130), 0, BLOCKS, GREEDY)], of_pool)
    assert [each.plan.quantized for each in context.expanded] == [True] * fp8
    assert [(each.first, each.row.plan.quantized) for each in context.masked] == [(first, False)] and context.indexed


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5"])
@pytest.mark.parametrize("cuts", [[130], [39, 91], [64, 30, 36], [101, 29]], ids=str)
def test_masked_prompts_have_the_logits_of_transformers(
    model: str, cuts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some of a row's queries are scored at a time.
    monkeypatch.setattr(indexed_rows, "MOST_SCORES", 25 * 130)
    checkpoint = tiny_checkpoint(tmp_path, **FAMILY[model])
    expected = oracle_logits(load_oracle_of_family(checkpoint), random_prompt(130))
    assert relative_error(our_logits(checkpoint, random_prompt(130), BLOCKS, cuts), expected) < 1e-5


# Queries that select begin at any token.
@pytest.mark.parametrize("top_k", [V32["index_topk"], V32["index_topk"] - 1])
def test_quantized_outputs_of_masked_prompts_are_the_same(
    top_k: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    changes = {"index_head_dim": 128, "q_lora_rank": 128, "index_topk": top_k}
    source = tiny_checkpoint(tmp_path, dtype="float8", num_hidden_layers=1, **{**V32, **changes})

    def compute() -> torch.Tensor:
        return our_logits(source, random_prompt(90), BLOCKS, [90], dtype=torch.bfloat16, weights="quantized")

    latents = compute()
    request.getfixturevalue("masks")
    masked = compute()
    assert not torch.equal(masked, latents) and relative_error(masked, latents) < 0.05


@pytest.mark.gpu
@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("weights", ["dequantized", "quantized"])
def test_masked_prompts_on_a_gpu_are_as_exact(weights: KeptWeights, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny", dtype="float8", overrides={**V32, **PUBLISHED_HEADS, "num_hidden_layers": 1})
    prompt, cuts = random_prompt(130), [90, 40]
    exact = our_logits(tmp_path, prompt, BLOCKS, cuts)

    def error(device: str) -> float:
        """Rounding changes some choices of tokens: 0.025 on a CPU, and 0.085 with quantized weights."""
        found = our_logits(tmp_path, prompt, BLOCKS, cuts, dtype=torch.bfloat16, weights=weights, device=device)
        return relative_error(found.cpu(), exact)

    assert error("cuda") < 1.5 * error("cpu") + 1e-4

"""The model on a GPU against the same model on the CPU in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import random_prompt
from tests.support.family import FAMILY
from tests.support.oracle_model import our_logits, relative_error
from tools.make_checkpoint import make_checkpoint

TOKENS = random_prompt(150)
# A prompt's first chunk, another chunk, then one token at a time.
CHUNKS = [100, 30, *[1] * 20]
BLOCKS = [5, 2, 7]
# Widths that FP8 products accept, with groups of experts to choose from.
WIDE: dict[str, int | None] = {
    "hidden_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
# DeepSeek's own widths per head, which have kernels made for them.
PUBLISHED_HEADS = WIDE | {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
}
# Queries that are projected directly, as in Moonlight.
DIRECT_QUERIES = PUBLISHED_HEADS | {"q_lora_rank": None}
# Experts without groups, as many as those that one card holds have: one kernel chooses among them and lists rows.
MANY_EXPERTS = {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
MOONLIGHT = DIRECT_QUERIES | MANY_EXPERTS
GLM = PUBLISHED_HEADS | MANY_EXPERTS | {"qk_nope_head_dim": 192, "v_head_dim": 256, "num_attention_heads": 20}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "bf16, FP8 weights": {"dtype": torch.bfloat16, "weights": "quantized"},
    "bf16, FP8 KV": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
    "bf16, FP8 weights, FP8 KV": {"dtype": torch.bfloat16, "weights": "quantized", "kv_dtype": torch.float8_e4m3fn},
}


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5"])
@pytest.mark.parametrize("index_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_selected_tokens_are_those_of_the_definitions(
    form: str, index_dtype: torch.dtype, model: str, tmp_path: Path
) -> None:
    # An indexer's key is whole blocks.
    overrides = WIDE | {**FAMILY[model], "index_head_dim": 128}
    make_checkpoint(tmp_path, "tiny", dtype="float8", overrides=overrides)
    exact = our_logits(tmp_path, TOKENS, BLOCKS, CHUNKS)
    forms = FORMS[form] | {"index_dtype": index_dtype}
    defined = relative_error(our_logits(tmp_path, TOKENS, BLOCKS, CHUNKS, **forms), exact)
    found = our_logits(tmp_path, TOKENS, BLOCKS, CHUNKS, device="cuda", **forms).cpu()
    assert relative_error(found, exact) < 1.5 * defined + 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "widths",
    [{}, WIDE, PUBLISHED_HEADS, DIRECT_QUERIES, MOONLIGHT, GLM],
    ids=["tiny", "wide", "published heads", "direct queries", "Moonlight", "GLM"],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_is_as_exact_as_the_definitions(form: str, widths: dict[str, int | None], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny", dtype="float8", overrides=dict(widths))
    exact = our_logits(tmp_path, TOKENS, BLOCKS, CHUNKS)
    # Rounding changes some choices of experts, which changes the logits of so small a model a lot.
    defined = relative_error(our_logits(tmp_path, TOKENS, BLOCKS, CHUNKS, **FORMS[form]), exact)
    found = our_logits(tmp_path, TOKENS, BLOCKS, CHUNKS, device="cuda", **FORMS[form]).cpu()
    assert relative_error(found, exact) < 1.5 * defined + 1e-4

"""Rows of every kind in one step, of a model whose products take FP8."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.batch import Row
from engine.model import prompt_forms
from engine.model.inputs import build_context
from engine.model.model import Model
from engine.model.state import make_state
from engine.runner.capture import Capture, CudaCapture
from engine.runner.prompt_graphs import PromptGraphs
from engine.weights.loading import load_model
from tests.support.checkpoints import GREEDY, random_prompt
from tests.support.eager_graphs import EagerCapture
from tests.support.oracle_model import relative_error
from tools.make_checkpoint import make_checkpoint

# Widths that FP8 products accept.
WIDE = {
    "hidden_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 16,
    "v_head_dim": 16,
}
# Those of heads that have kernels made for them.
PUBLISHED_HEADS = WIDE | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# A token that decodes, and one with two drafts; a chunk that half of the heads compute at a time; two prompts, and two
# chunks that one call takes.
SPANS = [(40, 41), (60, 63), (150, 190), (0, 30), (0, 5), (5, 55), (10, 60)]
DRAFTS = [0, 2, 0, 0, 0, 0, 0]


@torch.inference_mode()
def logits_of(
    model: Model, groups: list[list[Row]], size: int | None, capture: Capture | None = None
) -> list[torch.Tensor]:
    """The logits of each row. Prefixes are computed before; then each group is one step. size: padded tokens of a
    step, which is captured with `capture`.
    """
    state = make_state(model.config, model.device, blocks=32, positions=200, rows=8, kv_dtype=torch.bfloat16, drafts=2)
    for row in (row for group in groups for row in group):
        if row.start:
            model.forward(build_context(model.config, [prefix_of(row)], state))
    graphs = None if capture is None or size is None else PromptGraphs(model, state, [size], capture)
    found = []
    for group in groups:
        context = dataclasses.replace(build_context(model.config, group, state, size), sampled=None)
        hidden = graphs.hidden_states(context, None) if graphs else model.hidden_states(context)
        every = model.logits(hidden)[: sum(row.tokens for row in group)]
        found += every.split([row.tokens for row in group])
    return found


def prefix_of(row: Row) -> Row:
    return Row(random_prompt(200)[: row.start], 0, row.block_ids, None)


@pytest.mark.parametrize(
    ("device", "widths", "error", "error_of_row"),
    [
        # Rounding, which differs with the processor, changes an FP8 value or a choice of experts now and then.
        pytest.param("cpu", WIDE, 0.005, 0.05, id="cpu"),
        pytest.param("cuda", PUBLISHED_HEADS, 0.2, 0.2, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_a_mixed_step_computes_every_row_as_alone(
    device: str,
    widths: dict[str, int],
    error: float,
    error_of_row: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_checkpoint(tmp_path, "tiny", dtype="float8", overrides=dict(widths))
    model = load_model(tmp_path, torch.bfloat16, torch.device(device), "quantized")
    monkeypatch.setattr(prompt_forms, "EXPANDED_TOKENS", 128)
    tokens = random_prompt(200)
    rows = [
        Row(tokens[start:stop], start, range(4 * index, 4 * index + 4), GREEDY, drafts=drafts)
        for index, ((start, stop), drafts) in enumerate(zip(SPANS, DRAFTS, strict=True))
    ]
    alone = logits_of(model, [[row] for row in rows], None)
    capture = EagerCapture() if device == "cpu" else CudaCapture()
    for together in (logits_of(model, [rows], 196), logits_of(model, [rows], 196, capture)):
        for found, expected in zip(together, alone, strict=True):
            assert found.isfinite().all() and relative_error(found, expected) < error_of_row
        assert relative_error(torch.cat(together), torch.cat(alone)) < error

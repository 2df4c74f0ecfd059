"""How heads are cut so that not too many keys are expanded at once, and that cutting changes no result."""

import pytest
import torch

from engine.batch import Row
from engine.model import expanded_attention, prompt_forms
from engine.model.expanded_attention import HEADS_TOGETHER, cut_heads
from engine.model.inputs import build_context
from engine.model.model import Model
from engine.model.state import make_state
from engine.weights.loading import load_model
from tests.support.checkpoints import GREEDY, random_prompt, tiny_checkpoint
from tests.support.oracle_model import relative_error


@pytest.mark.parametrize(
    ("heads", "keys", "sizes"),
    [
        (128, 16384, [128]),
        (128, 17000, [64, 64]),
        (128, 32768, [64, 64]),
        # 42 heads would fit, and the largest multiple of 8 below that is 40.
        (128, 49152, [32] * 4),
        (128, 131072, [16] * 8),
        # Never fewer than 8 heads, even with more keys.
        (16, 131072, [8, 8]),
        (4, 131072, [4]),
        (20, 40000, [8, 8, 4]),
    ],
)
def test_parts_of_heads_expand_no_more_keys_than_allowed(heads: int, keys: int, sizes: list[int]) -> None:
    parts = list(cut_heads(heads, keys, expanded=16384))
    assert [part.stop - part.start for part in parts] == sizes
    assert [part.start for part in parts] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert all(part.start % HEADS_TOGETHER == 0 for part in parts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")), torch.float32, torch.device("cpu"))


@torch.inference_mode()
def computed(model: Model, ends: list[int], *, quantized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after a prompt of 300 tokens whose chunks end at `ends`, and its KV."""
    tokens, blocks = random_prompt(300), [3, 0, 4, 1, 2]
    state = make_state(
        model.config, model.device, blocks=6, positions=300, rows=2, kv_dtype=torch.float32, quantized_prompts=quantized
    )
    state.kv_pool.zero_()
    for start, end in zip([0, *ends], [*ends, 300], strict=True):
        # A whole prompt is in the same step as the chunk.
        rows = [Row(tokens[start:end], start, blocks, GREEDY), Row(tokens[:40], 0, [5], None)]
        logits = model.forward(build_context(model.config, rows, state))
    return logits, state.kv_pool[:, :5].clone()


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("ends", [[], [190], [10, 64, 275]])
@pytest.mark.parametrize("quantized", [False, True])
def test_heads_that_are_cut_compute_what_all_do_together(
    model: Model, ends: list[int], together: int, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = computed(model, ends, quantized=quantized)
    monkeypatch.setattr(prompt_forms, "EXPANDED_TOKENS", 64)
    monkeypatch.setattr(expanded_attention, "HEADS_TOGETHER", together)
    found = computed(model, ends, quantized=quantized)
    assert all(relative_error(one, other) < 1e-4 for one, other in zip(found, expected, strict=True))


def test_chunks_compute_what_the_whole_prompt_does(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = computed(model, [], quantized=False)
    monkeypatch.setattr(prompt_forms, "EXPANDED_TOKENS", 64)
    monkeypatch.setattr(expanded_attention, "HEADS_TOGETHER", 1)
    found = computed(model, [10, 64, 275], quantized=False)
    assert all(relative_error(one, other) < 1e-4 for one, other in zip(found, expected, strict=True))

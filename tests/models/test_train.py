"""tiny-r1's training, a few steps of it on CPU."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

import models.train.trainer
from mesh.errors import ConfigError
from models.train.experts import Experts, best
from models.train.export import export
from models.train.generate import generate
from models.train.mixture import Mixture
from models.train.model import TinyModel
from models.train.muon import orthogonalize
from models.train.optimizers import Optimizers
from models.train.packing import BatchShape
from models.train.recipe import MORE, Stage
from models.train.step import TrainingStep
from models.train.trainer import Trainer
from tests.support.tiny_training import (
    CONFIG,
    LIBRARY,
    RECIPE,
    make_lively_model,
    make_model,
    make_source,
    make_tokenizer,
)


def rounded_to_bfloat16(model: TinyModel) -> TinyModel:
    """What a bfloat16 checkpoint holds, in float32."""
    copied = deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return copied


def test_a_few_steps_lower_both_losses() -> None:
    model = make_model()
    step = TrainingStep(model, Optimizers(model, RECIPE), RECIPE)
    seen = []
    for batch, _ in zip(make_source().batches(worker=0), range(14), strict=False):
        step(batch, progress=0.2)
        losses, load = step.read_sums()
        seen.append(losses[:2])
        assert load.sum() == 2 * 1024 * CONFIG["num_experts_per_tok"]
    assert (seen[-1] < 0.7 * seen[0]).all()


def test_the_export_loads_in_transformers_and_computes_the_same(tmp_path: Path) -> None:
    model = make_lively_model()
    export(model, CONFIG, make_tokenizer(), tmp_path, fp8=False)
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = rounded_to_bfloat16(model)
    tokens = torch.randint(7, CONFIG["vocab_size"], (200,), generator=torch.Generator().manual_seed(1))
    layout = ours.layout(torch.arange(200), torch.tensor([0, 200], dtype=torch.int32), 200)
    with torch.no_grad():
        got, expected = ours.lm_head(ours(tokens, layout, [])), theirs(tokens[None]).logits[0]
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_a_checkpoint_goes_on_learning_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Parsing the standard library takes seconds.
    monkeypatch.setattr(models.train.trainer, "library_entries", lambda: LIBRARY)
    start = tmp_path / "start"
    export(make_lively_model(), CONFIG, make_tokenizer(), start, fp8=True)
    talk = Mixture(0.0, (100, 300), tool_share=0.5, json_share=0.5, small_talk_share=0, library_share=0)
    stage = Stage("tools", 1.0, talk, BatchShape(2048, 2048, 16), fp8=True)
    recipe = replace(RECIPE, stages=(stage,), warm_up=0.0)

    def weights(*, train: bool) -> torch.Tensor:
        trainer = Trainer(recipe, tmp_path / "out", torch.device("cpu"), minutes=60, workers=0, start=start)
        if train:
            assert not trainer.train("tools", deadline=0)
        return trainer.model.lm_head.weight.detach()

    before, after = weights(train=False), weights(train=True)
    assert not torch.equal(before, after)
    assert torch.equal(weights(train=False), after)


def test_generation_with_a_cache_chooses_what_the_whole_sequence_does() -> None:
    model = make_lively_model()
    prompts = [list(range(10, 40)), list(range(50, 61))]
    for prompt, made in zip(prompts, generate(model, prompts, most_tokens=12, end=1), strict=True):
        tokens = torch.tensor([*prompt, *made])
        layout = model.layout(torch.arange(len(tokens)), torch.tensor([0, len(tokens)], dtype=torch.int32), 64)
        with torch.no_grad():
            chosen = model.lm_head(model(tokens, layout, [])).argmax(-1)
        assert made == chosen[len(prompt) - 1 : -1].tolist()


def test_documents_of_a_batch_do_not_see_each_other() -> None:
    model = make_lively_model()
    tokens = torch.arange(20, 60)
    positions = torch.cat((torch.arange(15), torch.arange(25)))
    together = model.layout(positions, torch.tensor([0, 15, 40], dtype=torch.int32), 64)
    alone = model.layout(torch.arange(25), torch.tensor([0, 25], dtype=torch.int32), 64)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, together, [])[15:], model(tokens[15:], alone, []))


def test_the_bias_moves_towards_experts_chosen_too_rarely() -> None:
    gate = make_model().gates()[0]
    gate.balance(torch.tensor([0, 0, 8, 8, 4, 4, 4, 4]), torch.tensor(0.5))
    assert gate.bias.tolist() == [0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0]


def test_the_chosen_experts_alone_compute_what_all_do() -> None:
    experts = make_lively_model().next_token.layer.mlp
    assert isinstance(experts, Experts)
    for fp8 in (False, True):
        experts.fp8 = fp8
        x = torch.randn(50, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(2))
        weights, _ = experts.gate(x)
        torch.testing.assert_close(experts.chosen_experts(x, weights), experts.all_experts(x, weights))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0, 2.0], [False, True, True]), ([1.0, 1.0, 1.0], [True, True, False])],
)
def test_the_best_are_the_largest_and_of_equals_the_first(values: list[float], expected: list[bool]) -> None:
    assert best(torch.tensor(values), 2).tolist() == expected


def test_orthogonalizing_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    singular = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert singular.min() > 0.5
    assert singular.max() < 1.5


def test_a_start_without_a_tokenizer_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.train.trainer, "library_entries", lambda: LIBRARY)
    start = tmp_path / "start"
    start.mkdir()
    with pytest.raises(ConfigError, match=r"start has no tokenizer: expected tokenizer\.json"):
        Trainer(RECIPE, tmp_path / "out", torch.device("cpu"), minutes=1, workers=0, start=start)


def test_smaller_steps_have_no_documents_that_are_longer() -> None:
    recipe = MORE.in_batches_of(4096)
    assert {(stage.shape.tokens, stage.shape.longest) for stage in recipe.stages} == {(4096, 4096)}
    assert recipe.checkup.long_tokens == (2048,)
    assert recipe.checkup.shape.tokens == 4096


def test_steps_of_a_sixteenth_have_a_quarter_of_the_rates() -> None:
    recipe = MORE.in_batches_of(4096)
    assert [recipe.matrix_rate, recipe.rate] == [MORE.matrix_rate / 4, MORE.rate / 4]


def test_rates_rise_hold_and_fall_to_zero() -> None:
    recipe = replace(RECIPE, warm_up=0.1, decay_from=0.5)
    assert [recipe.rate_factor(progress) for progress in (0.05, 0.3, 0.75, 1.0)] == [0.5, 1.0, 0.5, 0.0]

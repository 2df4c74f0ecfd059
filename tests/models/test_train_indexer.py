"""The training of indexers: they learn to foresee attention, and the exported model selects as it was trained to."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from engine.model.config import parse_model_config
from models.train.__main__ import main
from models.train.device_batch import DeviceBatch
from models.train.export import export
from models.train.indexer import INDEXERS, IndexParts, choose_tokens
from models.train.layers import attend, attend_to_chosen
from models.train.model import TinyModel
from models.train.optimizers import Optimizers
from models.train.restore import restore
from models.train.step import TrainingStep
from tests.support.oracle_model import our_logits, relative_error
from tests.support.tiny_training import CONFIG, RECIPE, make_lively_model, make_source, make_tokenizer

TOP_K = 24
# With fewer heads many scores would be 0, and which of equal ones are chosen is not the same everywhere.
INDEXED = {
    **CONFIG,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_topk": TOP_K,
}


def make_indexed_model() -> TinyModel:
    """The lively model, with indexers that know nothing."""
    torch.manual_seed(0)
    model = TinyModel(parse_model_config(INDEXED), torch.float32)
    model.load_state_dict(make_lively_model().state_dict(), strict=False)
    return model


def train(model: TinyModel, steps: int) -> torch.Tensor:
    """The sum of the indexers' losses at each step."""
    recipe = replace(RECIPE, config=INDEXED, index_rate=0.02)
    step = TrainingStep(model, Optimizers(model, recipe), recipe)
    seen = []
    for batch, _ in zip(make_source().batches(worker=0), range(steps), strict=False):
        step(batch, progress=0.2)
        seen.append(step.read_sums()[0][2])
    return torch.stack(seen)


@torch.no_grad()
def recalled(model: TinyModel) -> list[float]:
    """The shares of attention that go to the chosen, the best and any tokens."""
    torch.manual_seed(1)
    batch = DeviceBatch.of(next(make_source().batches(worker=1)), torch.device("cpu"))
    lesson = model.lesson(batch)
    model(batch.tokens, model.layout(batch.positions, batch.boundaries, batch.longest, lesson), [])
    return torch.stack([layer.recall(TOP_K) for layer in lesson.layers]).mean(0).tolist()


def test_indexers_learn_which_tokens_attention_goes_to() -> None:
    model = make_indexed_model()
    model.train_indexers(alone=True)
    frozen = deepcopy(model.state_dict())
    losses = train(model, 12)
    after, best, anyhow = recalled(model)
    assert losses[-3:].mean() < 0.9 * losses[:3].mean()
    assert 1.3 * anyhow < after <= best
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, frozen[name])}
    assert changed == {name for name in frozen if INDEXERS in name}


def test_all_learn_while_attention_goes_to_the_chosen() -> None:
    model = make_indexed_model()
    model.train_indexers(alone=False)
    before = deepcopy(dict(model.named_parameters()))
    train(model, 1)
    assert not [name for name, value in model.named_parameters() if torch.equal(value, before[name])]


def test_an_exported_model_selects_as_it_was_trained_to(tmp_path: Path) -> None:
    model = make_indexed_model()
    export(model, INDEXED, make_tokenizer(), tmp_path, fp8=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    tokens = torch.randint(7, CONFIG["vocab_size"], (200,), generator=torch.Generator().manual_seed(1))
    layout = model.layout(torch.arange(200), torch.tensor([0, 200], dtype=torch.int32), 200)
    served = our_logits(tmp_path, tokens.tolist(), [5, 2, 9, 1], [150, 49, 1])
    with torch.no_grad():
        dense = model.lm_head(model(tokens, layout, []))
        model.select(True)
        chosen = model.lm_head(model(tokens, layout, []))
    assert relative_error(served, chosen) < 1e-4
    assert relative_error(served, dense) > 0.1


def test_a_start_without_indexers_leaves_them_as_they_are(tmp_path: Path) -> None:
    model = make_lively_model()
    export(model, CONFIG, make_tokenizer(), tmp_path, fp8=False)
    indexed = make_indexed_model()
    before = {name: value.clone() for name, value in indexed.state_dict().items() if INDEXERS in name}
    torch.nn.init.zeros_(indexed.lm_head.weight)
    restore(indexed, tmp_path)
    assert all(torch.equal(indexed.state_dict()[name], value) for name, value in before.items())
    torch.testing.assert_close(indexed.lm_head.weight, model.lm_head.weight.bfloat16().float())


def test_indexers_change_no_other_file_of_a_checkpoint(tmp_path: Path) -> None:
    export(make_lively_model(), CONFIG, make_tokenizer(), tmp_path / "without", fp8=True)
    export(make_indexed_model(), INDEXED, make_tokenizer(), tmp_path / "with", fp8=True)
    without = {path.name: path.read_bytes() for path in (tmp_path / "without").glob("*.safetensors")}
    assert without == {path.name: path.read_bytes() for path in (tmp_path / "with").glob("model-*.safetensors")}


def test_queries_choose_within_their_document_and_before_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = IndexParts(
        torch.randn(40, 4, 8, generator=generator),
        torch.randn(40, 8, generator=generator),
        torch.rand(40, 4, generator=generator),
    )
    starts = torch.tensor([0] * 15 + [15] * 25)
    chosen = choose_tokens(parts, starts, 6)
    seen = torch.arange(40) + 1 - starts
    assert chosen.sum(1).tolist() == seen.clamp(max=6).tolist()
    row, token = chosen.nonzero().unbind(1)
    assert (token <= row).all() and (token >= starts[row]).all()
    scores = parts.scores(slice(39, 40), 40)[0, 15:]
    assert chosen[39, 15:].nonzero().flatten().tolist() == scores.topk(6).indices.sort().values.tolist()


def test_attention_to_chosen_tokens_is_attention_if_all_are_chosen() -> None:
    model = make_lively_model()
    boundaries = torch.tensor([0, 15, 40], dtype=torch.int32)
    layout = model.layout(torch.cat((torch.arange(15), torch.arange(25))), boundaries, 25)
    query, key, value = torch.randn(3, 40, 2, 16, generator=torch.Generator().manual_seed(0))
    everything = torch.ones(40, 40, dtype=torch.bool).tril() & (torch.arange(40) >= layout.starts[:, None])
    expected = attend(query, key, value, layout, 0.3)
    torch.testing.assert_close(attend_to_chosen(query, key, value, everything, 0.3), expected)


def test_indexers_without_a_finished_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="name it with --start"):
        main(out=tmp_path, indexers=True)

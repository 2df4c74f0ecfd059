"""Whether a checkpoint has the modules that drafts need."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.settings.draft_modules import INDEX, SINGLE, has_draft_modules
from tests.support.situations import model_of

MODEL = model_of(num_hidden_layers=2)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_module_is_found_by_the_names_of_its_tensors(layers: int, indexed: bool, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(layers)]
    if indexed:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    else:
        save_file({name: torch.zeros(1) for name in names}, tmp_path / SINGLE)
    assert has_draft_modules(tmp_path, MODEL) == (layers == 3)


def test_a_folder_without_weights_is_taken_at_its_word(tmp_path: Path) -> None:
    assert has_draft_modules(tmp_path, MODEL)
    assert not has_draft_modules(tmp_path, model_of(num_nextn_predict_layers=0))


def test_a_file_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"no")
    assert not has_draft_modules(tmp_path, MODEL)

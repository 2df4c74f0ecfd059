"""The checkpoint that training writes."""

import json
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from engine.model.config import read_model_config
from engine.model.quantization import Stored
from kernels.block_quant import dequantize_blocks
from models.train.evaluate import inference_copy
from models.train.export import export
from models.train.restore import restore
from tests.support.tiny_training import CONFIG, make_lively_model, make_model, make_tokenizer
from tools.chat import CHAT_TEMPLATE, Turn, conversation
from tools.checkpoint_tensors import checkpoint_tensors
from tools.tokenizer_files import BEGIN, END


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def test_names_and_shapes_are_those_of_a_published_checkpoint(tmp_path: Path) -> None:
    export(make_lively_model(), CONFIG, make_tokenizer(), tmp_path, fp8=False)
    expected = {spec.name: spec.shape for spec in checkpoint_tensors(CONFIG, range(0))}
    assert {name: tuple(tensor.shape) for name, tensor in tensors_in(tmp_path).items()} == expected


def test_an_fp8_checkpoint_quantizes_what_is_published_in_fp8(tmp_path: Path) -> None:
    export(make_lively_model(), CONFIG, make_tokenizer(), tmp_path, fp8=True)
    expected = {spec.name for spec in checkpoint_tensors(CONFIG, range(0)) if spec.quantizable}
    stored = tensors_in(tmp_path)
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn} == expected
    assert all(f"{name}_scale_inv" in stored for name in expected)
    assert read_model_config(tmp_path).quantization.linear is Stored.FP8


def test_an_fp8_checkpoint_holds_the_weights_that_training_simulated(tmp_path: Path) -> None:
    model = make_lively_model()
    model.simulate_fp8()
    export(model, CONFIG, make_tokenizer(), tmp_path, fp8=True)
    stored = tensors_in(tmp_path)
    simulated = dict(inference_copy(model).named_parameters())
    pairs = {
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": simulated["layers.0.self_attn.kv_a_proj_with_mqa.weight"],
        "model.layers.1.mlp.experts.3.down_proj.weight": simulated["layers.1.mlp.down_proj"][3],
        "model.layers.2.mlp.shared_experts.up_proj.weight": simulated[
            "next_token.layer.mlp.shared_experts.up_proj.weight"
        ],
    }
    for name, expected in pairs.items():
        restored = torch.empty(expected.shape)
        dequantize_blocks(stored[name], stored[f"{name}_scale_inv"], restored)
        torch.testing.assert_close(restored, expected.detach())


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_a_checkpoint_is_restored_as_it_was_written(tmp_path: Path, fp8: bool) -> None:
    model, restored = make_lively_model(), make_model()
    export(model, CONFIG, make_tokenizer(), tmp_path / "first", fp8=fp8)
    restore(restored, tmp_path / "first")
    export(restored, CONFIG, make_tokenizer(), tmp_path / "second", fp8=fp8)
    first, second = tensors_in(tmp_path / "first"), tensors_in(tmp_path / "second")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor.float(), second[name].float(), rtol=1e-6, atol=0)


def test_the_index_names_the_file_of_every_tensor(tmp_path: Path) -> None:
    export(make_lively_model(), CONFIG, make_tokenizer(), tmp_path, fp8=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for path in tmp_path.glob("*.safetensors"):
        assert all(index["weight_map"][name] == path.name for name in load_file(path))


def test_transformers_reads_the_tokenizer_as_it_was_trained(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    export(make_lively_model(), CONFIG, tokenizer, tmp_path, fp8=False)
    text = "What is 17 + 25? <think>QWX</think>"
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == tokenizer.encode(text).ids


def test_digits_and_codes_letters_are_single_tokens() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("1739 QWXZ", add_special_tokens=False).ids
    assert [tokenizer.decode([token]) for token in ids] == ["1", "7", "3", "9", " ", "Q", "W", "X", "Z"]


def test_the_chat_template_writes_conversations_as_they_were_trained_on() -> None:
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    turns = [Turn("Hi", "Hello!", "A greeting."), Turn("2+2?", "**4**", "2+2=4")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "A greeting.</think>Hello!"},
        {"role": "user", "content": "2+2?"},
    ]
    rendered = template.render(messages=messages, bos_token=BEGIN, eos_token=END, add_generation_prompt=True)
    assert rendered == conversation(turns, system="Be brief.").context


def test_the_chat_template_closes_the_thinking_where_none_is_wanted() -> None:
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "Hi"}]
    rendered = template.render(
        messages=messages, bos_token=BEGIN, eos_token=END, add_generation_prompt=True, thinking=False
    )
    assert rendered == conversation([Turn("Hi", "Hello!")]).context

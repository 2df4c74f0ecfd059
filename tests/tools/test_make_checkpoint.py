import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import read_tensors, tiny_checkpoint
from tools.byte_tokenizer import SMALLEST_VOCABULARY, build_tokenizer
from tools.make_checkpoint import checkpoint_config, make_checkpoint


def test_the_index_places_every_tensor_in_one_of_several_shards(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read_tensors(tmp_path).keys()
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_tensors(tmp_path).values())


def test_the_mtp_module_follows_the_last_layer(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    names = {name.removeprefix("model.layers.3.") for name in read_tensors(tmp_path) if ".layers.3." in name}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight"} <= names


def test_equal_seeds_write_equal_weights_and_others_do_not(tmp_path: Path) -> None:
    weights = [read_tensors(tiny_checkpoint(tmp_path / str(n), seed=seed)) for n, seed in enumerate((5, 5, 6))]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])


def test_float8_weights_are_scaled_blocks_of_float32_ones(tmp_path: Path) -> None:
    exact = read_tensors(tiny_checkpoint(tmp_path / "exact"))
    quantized = read_tensors(tiny_checkpoint(tmp_path / "quantized", dtype="float8"))
    name = "model.layers.1.self_attn.q_b_proj.weight"
    values, scale = quantized[name], quantized[f"{name}_scale_inv"]
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (2, 1)
    restored = values.float() * scale.repeat_interleave(128, 0)[: values.shape[0]]
    assert (restored - exact[name]).norm() / exact[name].norm() < 0.05
    assert quantized["lm_head.weight"].dtype == torch.bfloat16


def test_every_key_of_the_configuration_can_be_overridden(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, hidden_size=96, q_lora_rank=None, n_routed_experts=12, vocab_size=900)
    tensors = read_tensors(tmp_path)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 48, 96)
    assert tensors["model.layers.1.mlp.gate.weight"].shape == (12, 96)
    assert tensors["lm_head.weight"].shape == (900, 96)


@pytest.mark.parametrize("size", [SMALLEST_VOCABULARY, 1024, 70_000])
def test_a_tokenizer_has_exactly_the_vocabulary_and_every_id_decodes(size: int) -> None:
    tokenizer = build_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert all(tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(0, size, 7))


@pytest.mark.parametrize("text", ["Hello, world", "  spaces\n\tand lines", "日本語 🙂", "x<think>y</think>"])
def test_a_tokenizer_restores_any_text(text: str) -> None:
    tokenizer = build_tokenizer(1024)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_tokenizer_as_the_tokenizers_package_does(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs("Hello, 日本")["input_ids"] == ours.encode("Hello, 日本").ids
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (0, 1, 320)


def test_a_second_turn_extends_the_first_turns_prompt_and_answer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    second = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert first == "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>"
    assert second == first + "Hello<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜></think>"


def test_a_prompt_with_thinking_opens_the_reasoning(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path))
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, thinking=True)
    assert isinstance(prompt, str) and prompt.endswith("<｜Assistant｜><think>")


def test_the_small_preset_has_about_thirty_million_parameters() -> None:
    config = checkpoint_config("small")
    assert config["num_hidden_layers"] == 6 and config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576


def test_unknown_presets_and_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown preset 'huge'"):
        make_checkpoint(tmp_path, "huge")
    with pytest.raises(ConfigError, match="unknown dtype 'int4'"):
        make_checkpoint(tmp_path, "tiny", dtype="int4")


def test_a_model_that_could_not_be_served_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="n_group 3"):
        tiny_checkpoint(tmp_path / "model", n_group=3)
    with pytest.raises(ConfigError, match="vocab_size 100 is too small"):
        tiny_checkpoint(tmp_path / "model", vocab_size=100)
    assert not (tmp_path / "model").exists()

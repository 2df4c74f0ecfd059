import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.model.model import Model
from engine.model.parameters import Parameter, Part, merged_shape
from engine.model.quantization import KeptWeights
from engine.model.state import make_state
from engine.weights.checkpoint import load_weights
from engine.weights.loading import load_model
from engine.weights.reader import Reader
from engine.weights.shards import open_shards
from mesh.errors import CheckpointError
from tests.support.checkpoints import edit_config, read_tensors, rewrite_as_one_file, tiny_checkpoint
from tests.support.int4 import WIDE
from tools.make_checkpoint import make_checkpoint

CPU = torch.device("cpu")
GATE = "model.layers.1.mlp.gate.weight"


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return places(load_model(directory, dtype, CPU))


def places(model: Model) -> dict[str, torch.Tensor]:
    return {each.name: each.place for each in model.parameters()}


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def without(prefix: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """A change that drops the tensors whose names start with `prefix`."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_every_tensor_arrives_in_the_models_dtype(tmp_path: Path, stored: str) -> None:
    expected = read_tensors(tiny_checkpoint(tmp_path, dtype=stored, num_nextn_predict_layers=0))
    found = loaded(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].float()) for name in expected)


@pytest.mark.parametrize("published", ["bfloat16", "float32"])
def test_a_bfloat16_model_keeps_gates_as_published(published: str, tmp_path: Path) -> None:
    expected = read_tensors(tiny_checkpoint(tmp_path, dtype=published, num_nextn_predict_layers=0))
    found = loaded(tmp_path, torch.bfloat16)
    assert torch.equal(found[GATE], expected[GATE])
    assert found["lm_head.weight"].dtype == torch.bfloat16


def test_tensors_larger_than_the_staging_memory_are_converted_whole(tmp_path: Path) -> None:
    expected = read_tensors(tiny_checkpoint(tmp_path, dtype="bfloat16", vocab_size=70_000))
    assert expected["lm_head.weight"].nbytes > 16 << 20
    assert torch.equal(loaded(tmp_path)["lm_head.weight"], expected["lm_head.weight"].float())


def test_fp8_blocks_are_dequantized_ragged_ones_too(tmp_path: Path) -> None:
    # 192 x 176 leaves ragged blocks on both sides.
    stored = read_tensors(tiny_checkpoint(tmp_path, dtype="float8", q_lora_rank=176))
    found = loaded(tmp_path)
    name = "model.layers.1.self_attn.q_b_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:192, :176]
    assert torch.equal(found[name], stored[name].float() * scale)


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    expected = read_tensors(tiny_checkpoint(tmp_path))
    rewrite_as_one_file(tmp_path)
    assert torch.equal(loaded(tmp_path)[GATE], expected[GATE])


def test_mtp_modules_are_neither_loaded_nor_given_kv(tmp_path: Path) -> None:
    published = read_tensors(tiny_checkpoint(tmp_path, num_nextn_predict_layers=2))
    assert "model.layers.4.eh_proj.weight" in published
    model = load_model(tmp_path, torch.float32, CPU)
    assert {name.split(".")[2] for name in places(model) if ".layers." in name} == {"0", "1", "2"}
    state = make_state(model.config, model.device, blocks=4, positions=64, rows=1, kv_dtype=torch.float32)
    assert len(state.kv_pool) == model.config.kv_layers == 3


def test_mtp_weights_may_be_missing(tmp_path: Path) -> None:
    rewrite_as_one_file(tiny_checkpoint(tmp_path), without("model.layers.3."))
    assert load_model(tmp_path, torch.float32, CPU).config.kv_layers == 3


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard = first_shard(tiny_checkpoint(tmp_path))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing: .* places \d+ tensors there"):
        loaded(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    rewrite_as_one_file(tiny_checkpoint(tmp_path), without(GATE))
    with pytest.raises(CheckpointError, match=f"lacks {GATE}"):
        loaded(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path: Path) -> None:
    index = tiny_checkpoint(tmp_path) / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.layers.0.extra.weight"] = first_shard(tmp_path).name
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"does not hold model\.layers\.0\.extra\.weight"):
        loaded(tmp_path)


def test_a_wrong_shape_is_reported_with_what_was_expected(tmp_path: Path) -> None:
    edit_config(tiny_checkpoint(tmp_path), q_lora_rank=32)
    with pytest.raises(
        CheckpointError, match=r"q_a_proj\.weight in .* has shape \[64, 128\]; config\.json makes it \[32"
    ):
        loaded(tmp_path)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    edit_config(tiny_checkpoint(tmp_path), n_routed_experts=4)
    with pytest.raises(CheckpointError, match=r"config\.json does not describe: .*experts\.4.* and \d+ more"):
        loaded(tmp_path)


def test_modules_that_the_configuration_does_not_count_are_skipped(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "with", num_nextn_predict_layers=2)
    expected = loaded(tmp_path / "with").keys()
    edit_config(tmp_path / "with", num_nextn_predict_layers=0)
    assert loaded(tmp_path / "with").keys() == expected


def test_rotary_buffers_of_older_tools_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_as_one_file(tiny_checkpoint(tmp_path), lambda tensors: tensors.update({name: torch.ones(8)}))
    assert name not in loaded(tmp_path)


def test_an_fp8_weight_without_its_scale_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    rewrite_as_one_file(tiny_checkpoint(tmp_path, dtype="float8"), without(name))
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        loaded(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path: Path, kept: int) -> None:
    shard = first_shard(tiny_checkpoint(tmp_path))
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        loaded(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    shard = first_shard(tiny_checkpoint(tmp_path))
    shard.write_bytes((4).to_bytes(8, "little") + b"nope" + bytes(100))
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        loaded(tmp_path)


def with_header(directory: Path, header: object) -> Path:
    """The directory, after the first file of weights has this header and 512 bytes of data."""
    text = json.dumps(header).encode()
    first_shard(directory).write_bytes(len(text).to_bytes(8, "little") + text + bytes(512))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data_offsets": "xx"},
        {"data_offsets": [-512, 0]},
        {"data_offsets": [0, 512], "shape": ["128"]},
        {"data_offsets": [0, 512], "dtype": {}},
    ],
    ids=["nowhere", "text", "before the data", "a shape of text", "a dtype that is no text"],
)
def test_a_header_that_does_not_place_its_tensors_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not say where model\.norm\.weight lies"):
        loaded(with_header(tmp_path, {"model.norm.weight": {"dtype": "F32", "shape": [128], **changes}}))


def test_a_number_that_is_too_long_to_read_is_refused(tmp_path: Path) -> None:
    shard = first_shard(tiny_checkpoint(tmp_path))
    text = b'{"model.norm.weight": 1%s}' % (b"0" * 5000)
    shard.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        loaded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"cannot read .*index\.json"):
        loaded(tmp_path)


def test_a_header_that_is_no_object_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="its header is no JSON object"):
        loaded(with_header(tmp_path, ["model.norm.weight"]))


@pytest.mark.parametrize(
    "name",
    ["../model-00001-of-00002.safetensors", "x" * 1000, "", 1, "\0", "\ud800"],
    ids=["elsewhere", "long", "empty", "number", "zero byte", "half a character"],
)
def test_an_index_names_files_of_its_own_directory_alone(name: object, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match="has no weight_map from tensors to files"):
        loaded(tmp_path)


def test_a_directory_in_a_shards_place_is_named(tmp_path: Path) -> None:
    shard = first_shard(tiny_checkpoint(tmp_path))
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        loaded(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="it holds no weights"):
        loaded(tmp_path)


def loaded_into(directory: Path, name: str, place: torch.Tensor, *slices: slice) -> torch.Tensor:
    """A part of one tensor of a checkpoint, read alone."""
    with open_shards(directory) as shards:
        parameter = Parameter(name, place, shards.entries[name].shape, slices)
        load_weights(Reader(shards, CPU), [Part([parameter])], unused=("model.", "lm_head."))
    return place


def test_parameters_may_have_any_strides(tmp_path: Path) -> None:
    expected = read_tensors(tiny_checkpoint(tmp_path))[GATE]
    found = loaded_into(tmp_path, GATE, torch.empty(expected.shape[::-1]).t(), slice(0, 8), slice(0, 128))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [slice(0, 320), slice(64, 160), slice(319, 320)])
@pytest.mark.parametrize("columns", [slice(0, 128), slice(96, 128)])
def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path, rows: slice, columns: slice, dtype: torch.dtype) -> None:
    expected = read_tensors(tiny_checkpoint(tmp_path))["lm_head.weight"][rows, columns]
    found = loaded_into(tmp_path, "lm_head.weight", torch.empty(expected.shape, dtype=dtype), rows, columns)
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("rows", [slice(0, 192), slice(40, 150), slice(128, 192)])
@pytest.mark.parametrize("columns", [slice(0, 176), slice(100, 176)])
def test_a_part_of_fp8_blocks_is_dequantized_alone(tmp_path: Path, rows: slice, columns: slice) -> None:
    tiny_checkpoint(tmp_path, dtype="float8", q_lora_rank=176)
    name = "model.layers.1.self_attn.q_b_proj.weight"
    whole = loaded(tmp_path)[name]
    place = torch.empty(whole[rows, columns].shape)
    assert torch.equal(loaded_into(tmp_path, name, place, rows, columns), whole[rows, columns])


def test_a_part_of_an_fp8_weight_stays_as_published(tmp_path: Path) -> None:
    published = read_tensors(tiny_checkpoint(tmp_path, dtype="float8"))
    name = "model.layers.1.self_attn.q_b_proj.weight"
    place = torch.empty(64, 32, dtype=torch.float8_e4m3fn)
    found = loaded_into(tmp_path, name, place, slice(64, 128), slice(32, 64))
    assert torch.equal(found.float(), published[name][64:128, 32:64].float())


PEAK = """
import re, sys
from pathlib import Path
import torch
from engine.weights.loading import load_model
def peak() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
before = peak()
model = load_model(Path(sys.argv[1]), torch.bfloat16, torch.device("cpu"))
print(peak() - before)
"""


def test_loading_peaks_below_a_fifth_more_than_the_checkpoint(tmp_path: Path) -> None:
    tiny_checkpoint(
        tmp_path, dtype="bfloat16", hidden_size=1024, moe_intermediate_size=1024, num_nextn_predict_layers=0
    )
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size > 100 << 20
    output = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True).stdout
    assert 0.9 * size < int(output) < 1.2 * size


def test_fp8_weights_stay_as_they_are_published(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny", dtype="float8", overrides=WIDE)
    kept = places(load_model(tmp_path, torch.bfloat16, CPU, "quantized"))
    published = read_tensors(tmp_path)
    gate_up = "model.layers.1.mlp.experts.3.up_proj.weight"
    attention = "model.layers.0.self_attn"
    for name in (gate_up, f"{gate_up}_scale_inv", f"{attention}.o_proj.weight", f"{attention}.kv_b_proj.weight"):
        assert torch.equal(kept[name].float(), published[name].float())


def with_powers_of_two(directory: Path, *, stored: torch.dtype) -> Path:
    """An FP8 checkpoint whose scales are powers of two, in this dtype."""
    make_checkpoint(directory, "tiny", dtype="float8", overrides=WIDE)

    def round_up(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("_scale_inv"):
                tensors[name] = tensors[name].log2().ceil().exp2().to(stored)

    rewrite_as_one_file(directory, round_up)
    return directory


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, "dequantized"), (torch.bfloat16, "quantized")], ids=["dequantized", "kept"]
)
def test_scales_in_e8m0_are_read_as_floats(dtype: torch.dtype, weights: KeptWeights, tmp_path: Path) -> None:
    expected, found = (
        places(load_model(with_powers_of_two(tmp_path / str(stored), stored=stored), dtype, CPU, weights))
        for stored in (torch.float32, torch.float8_e8m0fnu)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)


def test_matrices_of_two_shared_experts_are_taken_apart(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "moe_intermediate_size": 128}
    make_checkpoint(tmp_path, "tiny", dtype="float8", overrides=wide | {"n_shared_experts": 2})
    published = read_tensors(tmp_path)
    kept = places(load_model(tmp_path, torch.bfloat16, CPU, "quantized"))
    for layer in ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "down_proj.weight_scale_inv"):
        name = f"model.layers.1.mlp.shared_experts.{layer}"
        assert merged_shape(kept[name]) == published[name].shape
        assert torch.equal(kept[name].float().flatten(), published[name].float().flatten())


def test_a_bf16_weight_where_fp8_is_declared_is_refused(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "moe_intermediate_size": 128}
    make_checkpoint(tmp_path, "tiny", dtype="float8", overrides=wide)
    name = "model.layers.0.self_attn.o_proj.weight"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].bfloat16()

    rewrite_as_one_file(tmp_path, widen)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight"):
        load_model(tmp_path, torch.bfloat16, CPU, "quantized")

"""Attention to the tokens that indexers select, in models of DeepSeek-V3.2's and GLM-5's kind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, SparsePrefillConfig
from engine.exchange.host import HostExchange
from engine.model import indexed_rows
from engine.model.allocator import Allocator
from engine.model.config import parse_model_config
from engine.model.state import make_state
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.settings.device import Hardware, resolve
from engine.weights.loading import load_model, make_model
from mesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import edit_config, model_backend, random_prompt, rewrite_as_one_file, tiny_checkpoint
from tests.support.family import FAMILY
from tests.support.nvfp4 import nvfp4_checkpoint
from tests.support.oracle_model import load_oracle_of_family, oracle_logits, our_logits, relative_error
from tests.support.rank_threads import on_each_rank
from tools.make_checkpoint import checkpoint_config

CPU = torch.device("cpu")
BLOCKS = [5, 2, 9]
V32 = FAMILY["deepseek-v3.2"]
TOP_K = V32["index_topk"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), **V32)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    return oracle_logits(load_oracle_of_family(checkpoint), random_prompt(130))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Logits of the same weights if all tokens are attended to."""
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("dense"), **{**V32, "index_topk": 130})
    return our_logits(checkpoint, random_prompt(130), BLOCKS, [130])


def published(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text())


@pytest.mark.parametrize("end", [1, TOP_K - 1, TOP_K, TOP_K + 1, 63, 64, 65, 129])
def test_a_prompt_cut_anywhere_has_the_same_logits(checkpoint: Path, expected: torch.Tensor, end: int) -> None:
    found = our_logits(checkpoint, random_prompt(130), BLOCKS, [end, 130 - end])
    assert relative_error(found, expected) < 1e-5


def test_keys_projected_with_latents_are_those_projected_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"index_head_dim": 128, "q_lora_rank": 128, "kv_lora_rank": 48, "qk_rope_head_dim": 16}
    source = tiny_checkpoint(tmp_path, dtype="float8", **{**V32, **changes})

    def compute() -> torch.Tensor:
        return our_logits(source, random_prompt(90), BLOCKS, [90], dtype=torch.bfloat16, weights="quantized")

    joined = compute()
    joins, asked = Allocator.joins, []
    monkeypatch.setattr(Allocator, "joins", lambda *given: asked.append(joins(*given)))
    assert torch.equal(compute(), joined) and asked == [True] * 3


def test_tokens_that_attend_to_all_need_no_index_queries(
    checkpoint: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("engine.model.indexer.make_queries")
    found = our_logits(checkpoint, random_prompt(130)[:TOP_K], BLOCKS, [TOP_K])
    assert relative_error(found, expected[:TOP_K]) < 1e-5


def test_a_long_prompts_queries_are_scored_in_parts(
    checkpoint: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_rows, "MOST_SCORES", 7 * 130)
    assert relative_error(our_logits(checkpoint, random_prompt(130), BLOCKS, [130]), expected) < 1e-5


def test_selection_changes_what_a_dense_model_would_compute(dense: torch.Tensor, expected: torch.Tensor) -> None:
    assert relative_error(dense[:TOP_K], expected[:TOP_K]) < 1e-5 and relative_error(dense, expected) > 0.5


def test_ranks_of_a_tp_group_select_the_same_tokens(checkpoint: Path, expected: torch.Tensor) -> None:
    def compute(peers: Peers) -> torch.Tensor:
        exchange = HostExchange(peers)
        return our_logits(checkpoint, random_prompt(130), BLOCKS, [70, 59, 1], exchange=exchange)

    for logits in on_each_rank(Layout(tp=2, ep=2), compute):
        assert relative_error(logits, expected) < 1e-5


def test_quantized_index_keys_select_mostly_the_same_tokens(
    checkpoint: Path, dense: torch.Tensor, expected: torch.Tensor
) -> None:
    found = our_logits(checkpoint, random_prompt(130), BLOCKS, [70, 58, 1, 1], index_dtype=torch.float8_e4m3fn)
    # With random weights many scores are nearly equal, and each other choice changes the choice of experts.
    assert relative_error(found, expected) < relative_error(dense, expected) / 2
    # Where all tokens are selected, keys do not matter.
    assert relative_error(found[:TOP_K], expected[:TOP_K]) < 1e-5


@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5"])
def test_modules_that_draft_have_indexers_of_their_own(tmp_path: Path, model: str) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path, **FAMILY[model]), drafts={"next_n": 1})
    names = {each.name for each in backend.weights.parameters() if each.name.endswith("indexer.wk.weight")}
    layers = [0, 2, 3] if model == "glm-5" else [0, 1, 2, 3]
    assert names == {f"model.layers.{layer}.self_attn.indexer.wk.weight" for layer in layers}


def test_fp8_checkpoints_may_leave_indexers_plain(tmp_path: Path) -> None:
    widths = {"index_head_dim": 128, "q_lora_rank": 128}
    source = tiny_checkpoint(tmp_path, dtype="float8", num_hidden_layers=1, **{**V32, **widths})

    def dtypes() -> set[torch.dtype]:
        model = load_model(source, torch.bfloat16, CPU, "quantized")
        return {each.place.dtype for each in model.parameters() if each.name.endswith((".wq_b.weight", ".wk.weight"))}

    def leave_plain(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".indexer.w" in name and name.endswith("_scale_inv")]:
            del tensors[name]
            weight = name.removesuffix("_scale_inv")
            tensors[weight] = tensors[weight].bfloat16()

    assert dtypes() == {torch.float8_e4m3fn}
    found = our_logits(source, random_prompt(50), BLOCKS, [50], dtype=torch.bfloat16, weights="quantized")
    exact = our_logits(source, random_prompt(50), BLOCKS, [50])
    assert relative_error(found[:TOP_K], exact[:TOP_K]) < 0.1 and found.isfinite().all()
    rewrite_as_one_file(source, leave_plain)
    assert dtypes() == {torch.bfloat16}


@pytest.mark.parametrize("published", [torch.bfloat16, torch.float32])
def test_weights_of_heads_keep_the_precision_they_are_published_in(published: torch.dtype, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, dtype="bfloat16", num_hidden_layers=1, **V32)

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weights_proj.weight")]:
            tensors[name] = tensors[name].to(published)

    rewrite_as_one_file(source, convert)
    model = load_model(source, torch.bfloat16, CPU, "quantized")
    kept = {each.place.dtype for each in model.parameters() if each.name.endswith("weights_proj.weight")}
    assert kept == {published}


def test_checkpoints_in_nvfp4_leave_indexers_plain(tmp_path: Path) -> None:
    source, prompt = nvfp4_checkpoint(tmp_path, **{**V32, "num_nextn_predict_layers": 0}), random_prompt(60)
    exact = our_logits(source, prompt, BLOCKS, [50, 10])
    found = our_logits(source, prompt, BLOCKS, [50, 10], dtype=torch.bfloat16, weights="quantized")
    assert relative_error(found[:TOP_K], exact[:TOP_K]) < 0.05 and found.isfinite().all()


def test_a_block_has_an_index_key_for_each_token(checkpoint: Path) -> None:
    config = parse_model_config(json.loads((checkpoint / "config.json").read_text()))
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        state = make_state(config, CPU, blocks=3, positions=64, rows=1, kv_dtype=torch.bfloat16, index_dtype=dtype)
        per_block = sum(plane[0, 0].numel() for plane in state.planes) * config.kv_layers
        assert per_block == 64 * config.kv_token_bytes(2, dtype.itemsize)


def test_kv_without_the_same_index_keys_has_another_namespace(checkpoint: Path) -> None:
    own = model_backend(checkpoint)
    rounded = model_backend(checkpoint, dtype="bfloat16", kv_dtype="auto")
    assert own.namespace.layout == "latent 64, interleaved rope 16, index keys 32 float32"
    assert not own.namespace.shares_base(rounded.namespace)
    assert own.kv_memory().piece_bytes * own.namespace.layers == own.block_bytes


def test_published_configurations_are_read() -> None:
    v32, glm = (parse_model_config(published(name)) for name in ("deepseek-v3.2", "glm-5"))
    assert v32.indexer is not None and glm.indexer is not None
    assert (v32.indexer.heads, v32.indexer.width, v32.indexer.top_k, v32.indexer.interleaved) == (64, 128, 2048, False)
    assert (glm.indexer.heads, glm.indexer.top_k, glm.indexer.interleaved) == (32, 2048, True)
    assert not v32.indexer.sharing and not glm.indexer.sharing and glm.num_hidden_layers == 78
    # 61 layers of 576 numbers in bf16, and 128 bytes with a scale.
    assert v32.kv_token_bytes(2) == 61 * (1152 + 132)


@pytest.mark.parametrize(
    ("changes", "sharing"),
    [
        ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, {2, 3, 5}),
        ({"index_topk_pattern": "FSSFFS"}, {1, 2, 5}),
        ({"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}, {2, 3, 5}),
    ],
    ids=["period", "pattern", "list"],
)
def test_layers_share_indexers_where_the_checkpoint_says_so(changes: dict[str, Any], sharing: set[int]) -> None:
    config = parse_model_config(published("glm-5") | {"num_hidden_layers": 6} | changes)
    assert config.indexer is not None and config.indexer.sharing == sharing
    assert [config.has_indexer(layer) for layer in range(7)] == [layer not in sharing for layer in range(7)]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"index_topk": 0}, "index_topk is 0: expected at least 1"),
        ({"index_topk": None}, "index_topk is missing"),
        ({"q_lora_rank": None}, "q_lora_rank is missing: an indexer reads compressed queries"),
        ({"index_head_dim": 48}, "48 is not a power of two"),
        ({"index_head_dim": 8}, "is less than qk_rope_head_dim"),
        ({"indexer_types": ["shared", "full", "full"]}, "no layer before the first one has an indexer"),
        ({"indexer_types": ["full", "other", "full"]}, "expected 'full' or 'shared' for each layer"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "have no indexer, leave it out"),
    ],
    ids=["zero", "absent", "direct queries", "width", "narrow", "first", "kind", "R1"],
)
def test_indexers_that_are_not_computed_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        parse_model_config(checkpoint_config("tiny", overrides=V32) | changes)


def test_a_checkpoint_without_indexers_is_refused(tmp_path: Path) -> None:
    edit_config(tiny_checkpoint(tmp_path), **V32)
    with pytest.raises(CheckpointError, match=r"no indexer for 3 of 3 layers \(the first is model.layers.0.self_attn"):
        load_model(tmp_path, torch.float32, CPU)


def test_sparse_prompts_of_dense_models_are_refused(checkpoint: Path) -> None:
    config = EngineConfig(model_dir=checkpoint, device="cpu", sparse_prefill=SparsePrefillConfig(recall=0.9))
    with pytest.raises(ConfigError, match=r"engine\.sparse_prefill is for models whose attention is dense"):
        make_model(resolve(config, Hardware(cuda_devices=0, free_memory_bytes=1 << 30)))

"""transformers' own models of the family in float32, which are the oracle of correctness, and comparisons with them."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, PreTrainedModel

from engine.batch import Row
from engine.exchange.interface import RankExchange
from engine.model.inputs import build_context
from engine.model.quantization import KeptWeights
from engine.model.state import make_state
from engine.weights.loading import load_model
from mesh.blocks import BLOCK_TOKENS
from tests.support.checkpoints import GREEDY
from tests.support.int4 import dequantized_tensors

# If the best two logits differ by less, rounding in float32 may choose either.
CLEAR_MARGIN = 1e-3


def load_oracle(directory: Path) -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def load_oracle_of_family(directory: Path) -> PreTrainedModel:
    """The class that config.json names, with the checkpoint's weights."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary]"""
    return oracle(torch.tensor([list(token_ids)])).logits[0]


@torch.inference_mode()
def our_logits(
    directory: Path,
    token_ids: Sequence[int],
    blocks: Sequence[int],
    chunks: Sequence[int],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: KeptWeights = "dequantized",
    kv_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.float32,
    exchange: RankExchange | None = None,
) -> torch.Tensor:
    """Teacher-forced logits [tokens, vocabulary], the tokens computed in chunks of these sizes; chunks of 1 decode."""
    assert sum(chunks) == len(token_ids)
    model = load_model(directory, dtype, torch.device(device), weights, exchange=exchange)
    state = make_state(
        model.config,
        model.device,
        blocks=max(blocks) + 1,
        positions=len(token_ids),
        rows=1,
        kv_dtype=kv_dtype or dtype,
        dtype=dtype,
        index_dtype=index_dtype,
    )
    logits, start = [], 0
    for size in chunks:
        stop = start + size
        row = Row(token_ids[start:stop], start, blocks[: -(-stop // BLOCK_TOKENS)], GREEDY)
        logits.append(model.forward(dataclasses.replace(build_context(model.config, [row], state), sampled=None)))
        start = stop
    return torch.cat(logits)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_greedy(oracle: PreTrainedModel, prompt: Sequence[int], generated: Sequence[int]) -> None:
    """Assert that each generated token is the oracle's choice after the tokens before it, if that choice is clear."""
    logits = oracle_logits(oracle, [*prompt, *generated])[len(prompt) - 1 : -1]
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR_MARGIN
    assert clear.float().mean() > 0.9, "too few positions of this model decide anything"
    assert torch.equal(torch.tensor(generated)[clear], logits.argmax(1)[clear])


def write_dequantized(
    source: Path, directory: Path, tensors: Callable[[Path], dict[str, torch.Tensor]] = dequantized_tensors
) -> Path:
    """The quantized checkpoint `source` as float32, each weight times its scales."""
    directory.mkdir()
    save_file(tensors(source), directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory

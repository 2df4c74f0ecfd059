"""Computes the calibration texts through a model, with one layer in memory at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

from engine.batch import Row
from engine.model.activations import Normalized
from engine.model.allocator import Allocator
from engine.model.context import ForwardContext
from engine.model.feed_forward import FeedForward
from engine.model.formats.choice import choose_formats
from engine.model.gate import Gate
from engine.model.inputs import build_context
from engine.model.mla import Attention
from engine.model.quantization import Quantization
from engine.model.state import make_state
from kernels.norm.reference import rms_norm
from mesh.blocks import blocks_for
from tools.quantize.calibration import Calibration
from tools.quantize.source import Source

# Tokens that go through a layer at once.
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Routed:
    """The input of a layer's experts, and which experts each token chose."""

    # [tokens, hidden]
    hidden: torch.Tensor
    # [tokens, k] each: the chosen experts and their weights.
    choices: torch.Tensor
    weights: torch.Tensor

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the tokens that chose this expert, and its weight for each of them."""
        tokens, places = (self.choices == expert).nonzero(as_tuple=True)
        return tokens, self.weights[tokens, places]


@dataclass(frozen=True, slots=True)
class _Chunk:
    tokens: slice
    context: ForwardContext


# Given the experts' input, returns what they add to the residual: [tokens, hidden].
ComputeExperts = Callable[[Routed], torch.Tensor]


class LayerPass:
    """Owns the residual of all calibration tokens before layer `next_layer`. MTP modules count as layers at the end."""

    def __init__(self, source: Source, calibration: Calibration, state_file: Path) -> None:
        """state_file: where `save` keeps the residual. If the file exists, the pass goes on from there."""
        self._source, self._config, self._file = source, source.config, state_file
        dtype = torch.bfloat16 if source.device.type == "cuda" else torch.float32
        formats = choose_formats(Quantization(), dtype, dequantize=True)
        self._allocate = Allocator(dtype, source.device, formats)
        ids = [token for sequence in calibration.sequences for token in sequence]
        self._token_ids = torch.tensor(ids, device=source.device)
        self._chunks = list(self._make_chunks(calibration))
        self.next_layer, self._residual = self._begin()

    def run_layer(self, compute_experts: ComputeExperts) -> None:
        """Compute the next layer. If it has experts, `compute_experts` computes them."""
        index = self.next_layer
        prefix = f"model.layers.{index}"
        if index in self._config.unused_layers:
            self._enter_mtp_module(index)
        residual = self._residual
        self._attend(prefix, indexed=self._config.has_indexer(index))
        hidden = self._normalized(residual, f"{prefix}.post_attention_layernorm.weight")
        dense = index < self._config.first_k_dense_replace
        if dense:
            residual += self._feed_forward(hidden, f"{prefix}.mlp", self._config.intermediate_size)
        else:
            width = self._config.moe_intermediate_size * self._config.n_shared_experts
            residual += self._feed_forward(hidden, f"{prefix}.mlp.shared_experts", width)
            residual += compute_experts(self._route(hidden, f"{prefix}.mlp.gate")).to(residual.dtype)
        self.next_layer += 1

    def hidden(self) -> torch.Tensor:
        """The head's input after the last layer: [tokens, hidden]."""
        return self._normalized(self._residual, "model.norm.weight")

    def save(self) -> None:
        """Keep the residual for a later run that goes on from here."""
        partial = self._file.with_suffix(".partial")
        save_file({"residual": self._residual.cpu()}, partial, metadata={"next_layer": str(self.next_layer)})
        partial.rename(self._file)

    def _begin(self) -> tuple[int, torch.Tensor]:
        if self._file.exists():
            with safe_open(self._file, framework="pt") as file:
                return int(file.metadata()["next_layer"]), file.get_tensor("residual").to(self._source.device)
        embedding = self._tensor("model.embed_tokens.weight")
        return 0, functional.embedding(self._token_ids, embedding)

    def _make_chunks(self, calibration: Calibration) -> Iterator[_Chunk]:
        sequences = calibration.sequences
        blocks = sum(blocks_for(len(sequence)) for sequence in sequences)
        state = make_state(
            replace(self._config, num_hidden_layers=1), self._source.device, blocks=blocks,
            positions=max(map(len, sequences)), rows=1, kv_dtype=self._allocate.dtype,
            dtype=self._allocate.dtype,
        )  # fmt: skip
        stops = [0, *accumulate(map(len, sequences))]
        first_block, rows, start = 0, [], 0
        for (_, stop), sequence in zip(pairwise(stops), sequences, strict=True):
            count = blocks_for(len(sequence))
            rows.append(Row(sequence, 0, range(first_block, first_block + count), None))
            first_block += count
            if stop - start >= CHUNK_TOKENS or stop == stops[-1]:
                yield _Chunk(slice(start, stop), build_context(self._config, rows, state))
                rows, start = [], stop

    def _attend(self, prefix: str, *, indexed: bool) -> None:
        attention = Attention(self._config, 0, self._allocate, indexed=indexed)
        self._source.fill(attention.parameters(f"{prefix}.self_attn"))
        hidden = self._normalized(self._residual, f"{prefix}.input_layernorm.weight")
        for chunk in self._chunks:
            self._residual[chunk.tokens] += attention.forward(Normalized(hidden[chunk.tokens], None), chunk.context)

    def _feed_forward(self, hidden: torch.Tensor, prefix: str, width: int) -> torch.Tensor:
        layer = FeedForward(self._config.hidden_size, width, self._allocate)
        self._source.fill(layer.parameters(prefix))
        out = torch.empty_like(hidden)
        for chunk in self._chunks:
            out[chunk.tokens] = layer.forward(Normalized(hidden[chunk.tokens], None), chunk.context.workspace)
        return out

    def _route(self, hidden: torch.Tensor, prefix: str) -> Routed:
        gate = Gate(self._config, self._allocate, shared=0)
        self._source.fill(gate.parameters(prefix))
        weights, choices = gate.choose(Normalized(hidden, None))
        return Routed(hidden, choices, weights)

    def _enter_mtp_module(self, index: int) -> None:
        """Set the residual to an MTP module's input. The module merges the embedding of a following token with the
        input of the head before it (DeepSeek-V3, 2024, 2.2).
        """
        prefix, depth = f"model.layers.{index}", index - self._config.num_hidden_layers + 1
        following = functional.embedding(self._token_ids.roll(-depth), self._tensor(f"{prefix}.embed_tokens.weight"))
        before = f"model.layers.{index - 1}.shared_head.norm.weight"
        hidden = self.hidden() if depth == 1 else self._normalized(self._residual, before)
        joined = [
            self._normalized(following, f"{prefix}.enorm.weight"),
            self._normalized(hidden, f"{prefix}.hnorm.weight"),
        ]
        self._residual = functional.linear(torch.cat(joined, dim=1), self._tensor(f"{prefix}.eh_proj.weight"))

    def _normalized(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._tensor(name), self._config.rms_norm_eps)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._source.matrix(name).to(self._allocate.dtype)

"""The lightning indexer's dimensions, and which layers have one, read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.json_reader import JsonReader
from mesh.errors import CheckpointError

# A key of one byte a number has a scale.
SCALE_BYTES = 4
# The most scores of a layer's indexer at a time. Prompts are cut so that they need no more: 256 MiB.
MOST_SCORES = 1 << 26
# What attends to what an own indexer selects, and to what that of an earlier layer has selected.
OWN, SHARED = "full", "shared"


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Names without `index_` of config.json; `width` is `index_head_dim`."""

    heads: int
    width: int
    # How many tokens a query attends to.
    top_k: int
    # Whether rotated numbers are paired with their neighbours; else with those half of them apart.
    interleaved: bool
    # Layers without an indexer: they attend to what that of the nearest layer before them has selected.
    sharing: frozenset[int]

    def key_bytes(self, item_bytes: int) -> int:
        """Bytes of a token's key in one layer, with `item_bytes` for each of its numbers."""
        return self.width * item_bytes + (SCALE_BYTES if item_bytes == 1 else 0)


def read_indexer(values: Mapping[str, Any], *, expected: bool) -> IndexerConfig | None:
    """expected: whether models of the architecture have indexers. Raises CheckpointError."""
    reader = JsonReader(values)
    if not expected:
        if reader.has("index_topk"):
            raise CheckpointError(
                f"index_topk is {values['index_topk']!r}: models of this architecture have no indexer, leave it out"
            )
        return None
    config = IndexerConfig(
        heads=reader.positive("index_n_heads"),
        width=reader.positive("index_head_dim"),
        top_k=reader.positive("index_topk"),
        interleaved=reader.flag("indexer_rope_interleave", False),
        sharing=_sharing(reader, values),
    )
    if not reader.has("q_lora_rank"):
        raise CheckpointError("q_lora_rank is missing: an indexer reads compressed queries")
    if config.width < reader.positive("qk_rope_head_dim"):
        raise CheckpointError(f"index_head_dim {config.width} is less than qk_rope_head_dim, which it rotates")
    if config.width & (config.width - 1):
        raise CheckpointError(
            f"index_head_dim {config.width} is not a power of two, as the indexer's Hadamard matrix is"
        )
    return config


def _sharing(reader: JsonReader, values: Mapping[str, Any]) -> frozenset[int]:
    """As transformers reads what GLM publishes: a list, a pattern of letters, or every how many layers have one."""
    layers = reader.positive("num_hidden_layers")
    kinds = values.get("indexer_types") or values.get("index_topk_pattern")
    if isinstance(kinds, str):
        kinds = [{"F": OWN, "S": SHARED}.get(letter, letter) for letter in kinds]
    if kinds is None:
        period, offset = reader.positive("index_topk_freq", 1), reader.count("index_skip_topk_offset", 2)
        kinds = [SHARED if max(layer - offset + 1, 0) % period else OWN for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {OWN, SHARED}:
        raise CheckpointError(f"indexer_types {kinds} is not supported: expected {OWN!r} or {SHARED!r} for each layer")
    if kinds[0] == SHARED:
        raise CheckpointError("indexer_types begins with 'shared': no layer before the first one has an indexer")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == SHARED)

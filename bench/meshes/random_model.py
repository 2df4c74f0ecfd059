"""A model directory without weights, from which workers with random ones, and a gateway, are started."""

from pathlib import Path

from bench.rank.model import write_shape
from capacity.shapes import SHAPES
from tools.byte_tokenizer import write_tokenizer


def write_random_model(
    directory: Path, shape: str, layers: int | None = None, experts: str = "bf16", mtp_modules: int = 0
) -> Path:
    """The configuration of a published shape, and a tokenizer of its size. layers: by default as many as it has."""
    config = SHAPES[shape]
    write_tokenizer(directory, int(config["vocab_size"]), int(config["max_position_embeddings"]))
    return write_shape(directory, shape, layers or int(config["num_hidden_layers"]), experts, mtp_modules)

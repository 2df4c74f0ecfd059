"""What a rank receives in a decode step, at least."""

from bench.rank.floor import BF16
from engine.model.config import ModelConfig
from engine.model.quantization import Stored
from engine.parallel.layout import Layout
from kernels.act_quant import GROUP

SCALE_BYTES = 4
# A weight and an expert's number.
CHOICE_BYTES = 4 + 8


def wire_bytes(config: ModelConfig, layout: Layout, rows: int) -> float:
    """rows: of a TP group, all tokens of its requests in the step."""
    layers = config.num_hidden_layers
    mixtures = sum(not config.is_dense(layer) for layer in range(layers))
    return mixtures * _experts_bytes(config, layout, rows) + _group_bytes(config, layout, rows)


def guess_wire_bytes(config: ModelConfig, layout: Layout, rows: int, drafts: int) -> float:
    """The same of what guesses so many tokens behind each row: the MTP module, once for each."""
    total = 0.0
    for number in range(drafts):
        tokens = rows * (1 if number else 1 + drafts)
        # Embeddings are sums that all ranks get; what merges them with hidden states and attention leave sums, too;
        # attention and whoever draws see all rows.
        rows_bytes = 6 * _others(layout, tokens) * BF16 * config.hidden_size
        logits_bytes = _others(layout, rows) * BF16 * config.vocab_size
        total += _experts_bytes(config, layout, tokens) + rows_bytes + logits_bytes
    return total


def _experts_bytes(config: ModelConfig, layout: Layout, rows: int) -> float:
    """Bytes that a layer receives: the rows of all other ranks, and their sums for this one's."""
    hidden = config.hidden_size
    by_row = config.quantization.experts is Stored.INT4
    row_bytes = hidden + SCALE_BYTES * (1 if by_row else hidden // GROUP) + CHOICE_BYTES * config.num_experts_per_tok
    return (layout.world - 1) * rows / layout.tp * (row_bytes + hidden * BF16)


def _group_bytes(config: ModelConfig, layout: Layout, rows: int) -> float:
    """Bytes that a step receives: the others' parts of this rank's rows behind attention and dense layers, and their
    rows before these and the head; then the logits of their parts of the vocabulary.
    """
    layers = config.num_hidden_layers
    dense = sum(config.is_dense(layer) for layer in range(layers))
    # The embedding's sums, too.
    sums, gathered = layers + dense + 1, layers + dense + 1
    return _others(layout, rows) * BF16 * (config.hidden_size * (sums + gathered) + config.vocab_size)


def _others(layout: Layout, rows: int) -> float:
    """Rows, or parts of rows, that the other ranks of the TP group have."""
    return (layout.tp - 1) / layout.tp * rows

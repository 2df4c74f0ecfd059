"""The fewest bytes that a rank receives in a decode step."""

from capacity.floor import BF16
from engine.model.config import ModelConfig
from engine.model.quantization import Stored
from engine.parallel.layout import Layout
from kernels.act_quant import GROUP

SCALE_BYTES = 4
# Bytes of a choice: its weight and its expert's number.
CHOICE_BYTES = 4 + 8


def wire_bytes(config: ModelConfig, layout: Layout, rows: int) -> float:
    """Bytes that a rank receives in a step. rows: tokens of all requests of its TP group in the step."""
    layers = config.num_hidden_layers
    mixtures = sum(not config.is_dense(layer) for layer in range(layers))
    return mixtures * _experts_bytes(config, layout, rows) + _group_bytes(config, layout, rows)


def guess_wire_bytes(config: ModelConfig, layout: Layout, rows: int, drafts: int) -> float:
    """Bytes that a rank receives for guessing `drafts` tokens after each row. The MTP module runs once for each guess.

    rows: as in `wire_bytes`.
    """
    total = 0.0
    for number in range(drafts):
        tokens = rows * (1 if number else 1 + drafts)
        # Ranks exchange sums of the embeddings (which all ranks get whole), of the merge with hidden states and of
        # attention, and gather all rows for attention and for the draw.
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
    """Bytes that a rank receives in a step from its TP group: the others' parts of its own rows after attention and
    dense layers, the others' rows before these and the head, and the logits of the others' parts of the vocabulary.
    """
    layers = config.num_hidden_layers
    dense = sum(config.is_dense(layer) for layer in range(layers))
    # The 1 in `sums` is the embedding, the one in `gathered` the head.
    sums, gathered = layers + dense + 1, layers + dense + 1
    return _others(layout, rows) * BF16 * (config.hidden_size * (sums + gathered) + config.vocab_size)


def _others(layout: Layout, rows: int) -> float:
    """How many of `rows` rows, or parts of rows, the other ranks of the TP group have."""
    return (layout.tp - 1) / layout.tp * rows

"""Which tokens of a step draw, and what the draft layer computes of prompts: plain data, made of the step's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.batch import Row
from mesh.blocks import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Draws:
    """All draws of a step, in the order of its rows with sampling. In a grid of draws each of these rows has a line."""

    # By draw: its row.
    rows: Sequence[Row]
    # For each draw: the index in the step of the token it follows, and its index in the flattened [rows, width] grid.
    tokens: Sequence[int]
    places: Sequence[int]
    # By row with sampling: its index in the step, and its first draw.
    drawing: Sequence[int]
    first: Sequence[int]


@dataclass(frozen=True, slots=True)
class DraftPrompts:
    """The draft layer's part of rows that do not decode: each token with the hidden state of the token before it.

    The draft layer computes one position later than the model, up to the token that is drawn. In a prompt's first row
    it also computes the prompt's first token, which nothing comes before.
    """

    # Tokens that are yet to be drawn are 0.
    rows: Sequence[Row]
    # By token: the index in the step of the token before it, None for the first of a prompt.
    sources: Sequence[int | None]
    # By row with sampling, one draw each: the index of the drawn token here, and its position.
    drawn: Sequence[int]
    positions: Sequence[int]
    # By row: the index of its first token, and the block of the token before it, None where nothing comes before; the
    # index of its last token, and the block of that.
    first: Sequence[int]
    blocks_before: Sequence[int | None]
    last: Sequence[int]
    last_blocks: Sequence[int]


def are_first(ascending: Sequence[int]) -> bool:
    """Whether ascending indices are those of the first elements, which lie next to each other."""
    return not ascending or ascending[-1] == len(ascending) - 1


def leading_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """The leading rows that decode after a token whose KV is computed. In a batch such rows come before all others;
    only single tokens of prompts may come later.
    """
    return list(takewhile(_goes_on, rows))


def _goes_on(row: Row) -> bool:
    return row.decodes and row.start > 0 and row.sampling is not None and not row.shared


def plan_draws(rows: Sequence[Row], offsets: Sequence[int], width: int) -> Draws:
    """offsets: the index of each row's first token; width: how many places a line of the grid has."""
    drawing = [index for index, row in enumerate(rows) if row.sampling is not None]
    drawn: list[Row] = []
    tokens: list[int] = []
    places: list[int] = []
    first: list[int] = []
    for line, index in enumerate(drawing):
        row = rows[index]
        first.append(len(drawn))
        drawn += [row] * row.draws
        last = offsets[index] + row.tokens
        tokens += range(last - row.draws, last)
        places += range(line * width, line * width + row.draws)
    return Draws(drawn, tokens, places, drawing, first)


def plan_draft_prompts(rows: Sequence[Row], offset: int, padding_block: int) -> DraftPrompts:
    """offset: the index in the step of the rows' first token; padding_block: stands for blocks that a row lacks."""
    sources: list[int | None] = []
    first: list[int] = []
    last: list[int] = []
    for row in rows:
        first.append(len(sources))
        sources += [None] * (row.start == 0)
        sources += range(offset, offset + row.tokens)
        offset += row.tokens
        last.append(len(sources) - 1)
    shifted = [_shifted(row, padding_block) for row in rows]
    return DraftPrompts(
        rows=shifted,
        sources=sources,
        drawn=[index for index, row in zip(last, rows, strict=True) if row.sampling is not None],
        positions=[row.end for row in rows if row.sampling is not None],
        first=first,
        blocks_before=[row.block_ids[row.start // BLOCK_TOKENS] if row.start else None for row in rows],
        last=last,
        last_blocks=[row.block_ids[(row.end - 1) // BLOCK_TOKENS] for row in shifted],
    )


def _shifted(row: Row, padding_block: int) -> Row:
    """The draft layer's part of the row."""
    following = 0 if row.next_token is None else row.next_token
    token_ids = [*(row.token_ids if row.start == 0 else row.token_ids[1:]), following]
    block_ids = list(row.block_ids)
    if row.end >= len(block_ids) * BLOCK_TOKENS:
        block_ids.append(padding_block)
    if not row.start:
        return Row(token_ids, 0, block_ids, None, shared=row.shared, sparse=row.sparse)
    return Row(token_ids, row.start + 1, block_ids, None, shared=max(row.shared - 1, 0), sparse=row.sparse)

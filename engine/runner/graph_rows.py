"""The rows of a decode graph that compute the rows of a step. A few tokens of a prompt may take several.

Each row of the graph attends to what is before its own tokens. A layer writes the KV of all rows before it attends, so
tokens of one prompt may be in different rows. If the graph computes two micro-batches, earlier tokens have to be in the
earlier one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.batch import Row


class GraphRows(NamedTuple):
    """Each has one token, and drafts or more tokens of its prompt behind it."""

    rows: Sequence[Row]
    # How many of the first rows are parts of prompts that go on in later rows. The others are the ends of the step's
    # rows, one each, in the step's order.
    earlier: int


def graph_rows(rows: Sequence[Row], width: int) -> GraphRows:
    """rows: of a batch; width: how many tokens a row of the graph has at most, and so has any row that decodes."""
    if not rows or rows[-1].decodes:
        # Then all rows decode: rows of prompts come last, unless they have one token.
        return GraphRows(rows, 0)
    earlier: list[Row] = []
    last: list[Row] = []
    for row in rows:
        parts = [row] if row.decodes else _parts(row, width)
        earlier += parts[:-1]
        last.append(parts[-1])
    return GraphRows([*earlier, *last], len(earlier))


def _parts(row: Row, width: int) -> list[Row]:
    return [
        Row(
            row.token_ids[first : first + width],
            row.start + first,
            row.block_ids,
            None,
            drafts=min(width, row.tokens - first) - 1,
            shared=min(max(row.shared - first, 0), width),
            next_token=row.token_ids[first + width] if first + width < row.tokens else row.next_token,
        )
        for first in range(0, row.tokens, width)
    ]

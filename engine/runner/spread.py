"""How a chunk of one rank's prompt is divided over all ranks (context parallelism): plain data.

It is cut into two pieces for each rank, of which a rank computes one from the front and one from the back: all then
have about as many keys to attend to. In a sparse prompt each piece counts as a chunk of its own: its last queries
choose what it attends to.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.batch import Row


class Offer(NamedTuple):
    """How many tokens of a chunk a rank offers for all to compute, 0 if none, and how many others it computes."""

    chunk: int
    rest: int


class Division(NamedTuple):
    """How a chunk of `tokens` tokens is divided over `ranks` ranks."""

    tokens: int
    ranks: int

    @property
    def piece_tokens(self) -> int:
        """Tokens of all pieces but the last ones, which may be shorter or empty."""
        return -(-self.tokens // (2 * self.ranks))

    @property
    def share_tokens(self) -> int:
        """The most tokens of the chunk that a rank computes."""
        return 2 * self.piece_tokens

    def pieces(self, rank: int) -> list[tuple[int, int]]:
        """Where its pieces begin and end in the chunk."""
        return [self._piece(rank), self._piece(2 * self.ranks - 1 - rank)]

    def places(self) -> npt.NDArray[np.int64]:
        """By token of the chunk: its place in the joined shares of all ranks, each of `share_tokens` places."""
        piece, offset = np.divmod(np.arange(self.tokens), self.piece_tokens)
        second = piece >= self.ranks
        rank = np.where(second, 2 * self.ranks - 1 - piece, piece)
        places: npt.NDArray[np.int64] = rank * self.share_tokens + second * self.piece_tokens + offset
        return places

    def _piece(self, number: int) -> tuple[int, int]:
        begin = min(number * self.piece_tokens, self.tokens)
        return begin, min(begin + self.piece_tokens, self.tokens)


def offered(rows: Sequence[Row], fewest: int, reach: int) -> int | None:
    """The index of the row with the longest chunk that could be divided. None if no chunk has at least `fewest` tokens
    and ends within the first `reach` of its prompt.
    """
    chunks = [
        (row.tokens, -index)
        for index, row in enumerate(rows)
        if not (row.decodes or row.shared) and row.tokens >= fewest and row.end <= reach
    ]
    return -max(chunks)[1] if chunks else None


def chosen(offers: Sequence[Offer]) -> int | None:
    """The rank whose chunk all compute; None if that would not make the step shorter. offers: by rank."""
    ranks = len(offers)
    source = max(range(ranks), key=lambda rank: (offers[rank].chunk, -rank))
    if not offers[source].chunk:
        return None
    together = other_tokens(offers, source) + Division(offers[source].chunk, ranks).share_tokens
    return source if together < max(offer.chunk + offer.rest for offer in offers) else None


def other_tokens(offers: Sequence[Offer], source: int) -> int:
    """The most tokens that a rank computes in addition to its share of the source's chunk."""
    return max(offer.rest + (0 if rank == source else offer.chunk) for rank, offer in enumerate(offers))

"""Chunks of prompts that all ranks of a worker compute together (context parallelism).

Each rank attends to all keys before its share: in every layer the ranks exchange the latents of the whole chunk. The
rank whose prompt it is keeps them in the prompt's blocks, the others in blocks that belong to no request.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Row
from engine.exchange.interface import RankExchange
from engine.model.context import DeviceState, SharedLatents
from engine.model.expert_group import ExpertGroup
from engine.model.slots import slots_between
from engine.parallel.layout import Group
from engine.runner.block_copies import copy_blocks
from engine.runner.spread import Division, Offer, chosen, offered, other_tokens
from engine.step.shape import StepShape
from kernels.host_copy import to_device, to_indices
from kernels.kv_copy.words import as_words
from mesh.blocks import BLOCK_TOKENS, blocks_for
from mesh.domain.sparse_prefill import SparsePrefill

# Blocks of a prefix that are copied to the other ranks at once.
COPIED_BLOCKS = 64


class Spread(NamedTuple):
    """One rank's view of a step in which all ranks compute a chunk together."""

    # This rank's own rows without the divided one, then its pieces of the divided row.
    rows: Sequence[Row]
    # The most tokens that a rank computes.
    tokens: int
    latents: SharedLatents
    # [share] int64: for each place of this rank's share the index among its tokens; any index for places that are
    # empty.
    own: torch.Tensor
    # Set if the chunk is this rank's: how many of its other tokens come before the chunk, and how many are in all.
    around: tuple[int, int] | None

    def gathered(self, hidden: torch.Tensor, everybody: ExpertGroup) -> torch.Tensor:
        """The states of the step's own tokens in their order, and perhaps others after them: [tokens or more, hidden].

        hidden: [tokens, hidden] of `rows`. Every rank calls it.
        """
        chunk = everybody.gather(hidden[self.own])
        if self.around is None:
            return hidden
        before, rest = self.around
        return torch.cat((hidden[:before], chunk[self.latents.order], hidden[before:rest]))


class Spreading:
    """One rank's end. All ranks make the same calls."""

    def __init__(self, exchange: RankExchange, state: DeviceState, layers: int, blocks: range, fewest: int) -> None:
        """layers: how many layers of the KV are exchanged, from the first on; blocks: those of the pool that take other
        ranks' prompts, as far as they have room; fewest: the fewest tokens of a chunk that is divided.
        """
        self.exchange = exchange
        self._state = state
        self._planes = [plane[:layers] for plane in as_words(state.planes)]
        self._blocks = blocks
        self._fewest = fewest
        self._rank, self._ranks = exchange.place.rank, exchange.place.layout.world
        # A prompt of this rank, named by the array of its blocks, and up to which position the others have its keys.
        self._known: tuple[object, int] = (None, 0)

    def divide(self, rows: Sequence[Row], shape: StepShape) -> Spread | None:
        """How all ranks compute the step together; None if each rank computes its own rows."""
        if shape.decode_only or shape.tokens < self._fewest:
            return None
        index = offered(rows, self._fewest, len(self._blocks) * BLOCK_TOKENS)
        tokens = sum(row.tokens for row in rows)
        chunk = 0 if index is None else rows[index].tokens
        offers = self._offers(Offer(chunk, tokens - chunk))
        source = chosen(offers)
        if source is None:
            return None
        division = Division(offers[source].chunk, self._ranks)
        if source == self._rank:
            assert index is not None
            row, rest = rows[index], [*rows[:index], *rows[index + 1 :]]
            around = sum(each.tokens for each in rows[:index]), tokens - chunk
        else:
            row, rest, around = None, list(rows), None
        divided = self._told(source, row, division.tokens)
        pieces = [
            (number * division.piece_tokens, _piece(divided, *bounds))
            for number, bounds in enumerate(division.pieces(self._rank))
            if bounds[0] < bounds[1]
        ]
        # Where this rank's share lies in its batch, and in its pool.
        places = np.zeros(division.share_tokens, np.int64)
        slots = np.full(division.share_tokens, self._state.padding_block * BLOCK_TOKENS, np.int64)
        begin = sum(each.tokens for each in rest)
        for first, piece in pieces:
            places[first : first + piece.tokens] = np.arange(begin, begin + piece.tokens)
            slots[first : first + piece.tokens] = slots_between(piece, piece.start, piece.end)
            begin += piece.tokens
        latents = SharedLatents(
            *map(self._on_device, (slots, division.places(), slots_between(divided, divided.start, divided.end)))
        )
        together = other_tokens(offers, source) + division.share_tokens
        return Spread([*rest, *(piece for _, piece in pieces)], together, latents, self._on_device(places), around)

    def _offers(self, own: Offer) -> list[Offer]:
        gathered = self.exchange.all_gather(torch.tensor([own]), Group.WORLD)
        return [Offer(*offer) for offer in gathered.tolist()]

    def _told(self, source: int, row: Row | None, tokens: int) -> Row:
        """The divided row, in this rank's blocks. The other ranks get those keys before it that they lack."""
        told = torch.zeros(4 + tokens, dtype=torch.int64)
        if row is not None:
            prompt, end = self._known
            known = min(end, row.start) if prompt is row.block_ids else 0
            told = torch.tensor([row.start, known, *_numbers_of(row.sparse), *row.token_ids])
            self._known = row.block_ids, row.end
        else:
            self._known = None, 0
        start, known, threshold, recall, *token_ids = self.exchange.broadcast(told, Group.WORLD, source).tolist()
        blocks = self._blocks if row is None else row.block_ids
        stop = blocks_for(start)
        for first in range(known // BLOCK_TOKENS if known < start else stop, stop, COPIED_BLOCKS):
            self._copy(blocks[first : min(first + COPIED_BLOCKS, stop)], source)
        return Row(token_ids, start, blocks, None, sparse=_sparse_of(threshold, recall))

    def _copy(self, blocks: Sequence[int], source: int) -> None:
        ids = to_indices(blocks, self._state.device)
        copy_blocks(self.exchange, self._planes, ids, Group.WORLD, source, sends=source == self._rank)

    def _on_device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return to_device(values, self._state.device)


def _piece(row: Row, begin: int, end: int) -> Row:
    return Row(row.token_ids[begin:end], row.start + begin, row.block_ids, None, sparse=row.sparse)


def _numbers_of(sparse: SparsePrefill | None) -> tuple[int, int]:
    """How ranks tell each other: the threshold, and the bits of the recall, which are 0 only for an exact prompt."""
    return (0, 0) if sparse is None else (sparse.from_tokens, int(np.float64(sparse.recall).view(np.int64)))


def _sparse_of(threshold: int, recall: int) -> SparsePrefill | None:
    return SparsePrefill(threshold, float(np.int64(recall).view(np.float64))) if recall else None

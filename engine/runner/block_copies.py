"""Copies blocks of KV from one rank to the others of its group."""

from collections.abc import Sequence

import torch

from engine.exchange.interface import RankExchange
from engine.parallel.layout import Group


def copy_blocks(
    exchange: RankExchange,
    words: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    group: Group,
    source: int,
    *,
    sends: bool,
) -> None:
    """Write blocks of the source to the other ranks' pools. All ranks of the group make the same calls.

    words: int64 [layers, blocks, words] each, as of `as_words`; blocks: int64 [n], each rank's own ones; source: its
    index in the group; sends: whether this rank is the source.
    """
    for plane in words:
        if sends:
            exchange.broadcast(plane.index_select(1, blocks), group, source)
        else:
            place = plane.new_empty(len(plane), len(blocks), plane.shape[2])
            plane.index_copy_(1, blocks, exchange.broadcast(place, group, source))

"""The table on the device by which a layer's tokens find the slots of their experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.balance.placement import ExpertPlacement
from kernels.expert_route import route
from kernels.host_copy import copy_to_device


class ExpertSlots:
    """Its tensors stay where they are, so that captured steps read what a later placement wrote.

    Attributes:
        placement: which expert each slot holds.
        part: which part of the slots this rank has.
        chosen: [experts] int64, on the device: how often tokens of this rank have chosen each so far.
    """

    def __init__(self, placement: ExpertPlacement, part: int, device: torch.device) -> None:
        experts, parts = 1 + max(placement.experts), placement.parts
        self.placement = placement
        self.part = part
        # [experts, parts] int64: the slots of each expert's copies, and [experts] int64: how many these are; one piece
        # of memory.
        self._tables = torch.empty(experts * (parts + 1), dtype=torch.int64, device=device)
        self._slots = self._tables[: experts * parts].view(experts, parts)
        self._copies = self._tables[experts * parts :]
        self.chosen = torch.zeros(experts, dtype=torch.int64, device=device)
        # The same for tokens that another rank counts.
        self._counted_elsewhere = torch.zeros_like(self.chosen)
        self.publish(placement)

    @property
    def held(self) -> tuple[int, ...]:
        """The experts of this rank's slots."""
        return self.placement.part(self.part)

    def route(self, choices: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """The slots to which tokens go: copies of an expert take turns, token by token.

        choices: [tokens, k] int64, experts; padding has none, and is not counted. counts: whether no other rank counts
        them.
        """
        return route(choices, self._slots, self._copies, self.chosen if counts else self._counted_elsewhere)

    def publish(self, placement: ExpertPlacement) -> None:
        """Send the tokens of later steps by this placement. The slots must hold its experts by then.

        On a GPU this is one copy from the host: it begins when all earlier kernels have ended, and later ones begin
        after it.
        """
        self.placement = placement
        held = np.array(placement.experts)
        by_expert, copies = held.argsort(kind="stable"), np.bincount(held)
        # An expert's row of the table is filled up with the slot of its last copy.
        turns = np.minimum(np.arange(placement.parts), copies[:, None] - 1)
        slots = by_expert[(copies.cumsum() - copies)[:, None] + turns]
        copy_to_device(np.concatenate([slots.ravel(), copies]), self._tables)


@dataclass(frozen=True)
class BalancedLayer:
    slots: ExpertSlots
    # What this rank's slots hold: tensors [slots, ...], of which one slot's parts are an expert.
    weights: Sequence[torch.Tensor]

"""The slots of one layer's experts as its tokens find them, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.balance.placement import Placement
from kernels.expert_route import route
from kernels.host_copy import to_device


class ExpertSlots:
    """Its tensors stay where they are, so that captured steps read what a later placement wrote.

    Attributes:
        placement: which expert each slot holds.
        part: which part of the slots this rank has.
    """

    def __init__(self, placement: Placement, part: int, device: torch.device) -> None:
        experts = 1 + max(placement.experts)
        self.placement = placement
        self.part = part
        # [experts, parts] int64: the slots of each expert's copies, and [experts] int64: how many these are.
        self._slots = torch.empty(experts, placement.parts, dtype=torch.int64, device=device)
        self._copies = torch.empty(experts, dtype=torch.int64, device=device)
        # [experts] int64: how often tokens of this rank chose each since `take_chosen`.
        self._chosen = torch.zeros(experts, dtype=torch.int64, device=device)
        # The same of tokens that another rank counts.
        self._counted_elsewhere = torch.zeros_like(self._chosen)
        self.publish(placement)

    @property
    def held(self) -> tuple[int, ...]:
        """The experts of this rank's slots."""
        return self.placement.part(self.part)

    def route(self, choices: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """The slots to which tokens go: copies of an expert take turns, token by token.

        choices: [tokens, k] int64, experts; padding has none, and is not counted. counts: no other rank counts them.
        """
        return route(choices, self._slots, self._copies, self._chosen if counts else self._counted_elsewhere)

    def publish(self, placement: Placement) -> None:
        """Tokens of later steps go where it says. Slots have the contents that it says by then."""
        self.placement = placement
        copies: Sequence[list[int]] = [[] for _ in range(len(self._copies))]
        for slot, expert in enumerate(placement.experts):
            copies[expert].append(slot)
        filled = [slots + slots[-1:] * (placement.parts - len(slots)) for slots in copies]
        self._slots.copy_(to_device(np.array(filled, np.int64), self._slots.device))
        counts = np.array([len(slots) for slots in copies], np.int64)
        self._copies.copy_(to_device(counts, self._copies.device))

    def take_chosen(self) -> torch.Tensor:
        """[experts] int64, on the device; counting begins anew."""
        chosen = self._chosen.clone()
        self._chosen.zero_()
        return chosen


@dataclass(frozen=True)
class BalancedLayer:
    slots: ExpertSlots
    # What this rank's slots hold: tensors [slots, ...], of which one slot's parts are an expert.
    weights: Sequence[torch.Tensor]

"""How the logits of tokens that a request already has are lowered: as plain data on the host, and as tensors on the
device.

Presence and frequency penalties are OpenAI's; the repetition penalty is from Keskar et al., "CTRL", 2019, section 4.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from kernels.host_copy import to_device

# This bit of a count says that the token is in the prompt. The bits below it count how often it was generated.
IN_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class Penalty:
    """The penalties of one row. slot: the row of the counts that belongs to its request."""

    slot: int
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of all rows, [rows] each: slot int64, the others float32."""

    slot: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor

    @classmethod
    def pack(cls, penalties: Sequence[Penalty], device: torch.device) -> Self:
        factors = np.array([(each.repetition, each.presence, each.frequency) for each in penalties], np.float32)
        slot = to_device(np.array([each.slot for each in penalties], np.int64), device)
        return cls(slot, *to_device(np.ascontiguousarray(factors.T), device))


def count_tokens(counts: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> None:
    """Fill a request's counts. counts: [vocabulary] int32, one slot's."""
    counts.zero_()
    counts.index_fill_(0, to_device(np.array(prompt, np.int64), counts.device), IN_PROMPT)
    drawn = to_device(np.array(generated, np.int64), counts.device)
    counts.scatter_add_(0, drawn, torch.ones_like(drawn, dtype=counts.dtype))


def count_drawn(counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Count more tokens of each of these slots: [rows, n], where -1 is none. counts: [slots, vocabulary] int32; the
    others int64.
    """
    ones = (token_ids >= 0).int()
    counts.index_put_((slots.unsqueeze(1), token_ids.clamp(min=0)), ones, accumulate=True)


def add_bias(logits: torch.Tensor, biases: Sequence[tuple[int, int, float]]) -> None:
    """Add to single logits. logits: [rows, vocabulary] float32, contiguous; biases: row, token id, bias, each once."""
    flat = np.array([row * logits.shape[1] + token_id for row, token_id, _ in biases], np.int64)
    values = np.array([bias for _, _, bias in biases], np.float32)
    logits.view(-1).index_add_(0, to_device(flat, logits.device), to_device(values, logits.device))

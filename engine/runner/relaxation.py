"""Relaxed acceptance: while a model thinks, a draft that is near the likeliest token is taken for the drawn one.

The rule is TensorRT-LLM's for DeepSeek R1: the draft is among the top N, and within delta of the likeliest token's
probability. A row takes part if its request does. Where its tokens open or close the thinking, its later drafts follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Row
from engine.runner.draft_plan import Draws
from engine.thinking import ThinkTokens
from kernels.host_copy import to_device
from kernels.sample import is_candidate


@dataclass(frozen=True, slots=True)
class RelaxationRule:
    think_tokens: ThinkTokens
    top_n: int
    delta: float


class Relaxation:
    """Of one step. Draws are named by their indices in it."""

    def __init__(self, rule: RelaxationRule, rows: Sequence[Row], draws: Draws, device: torch.device) -> None:
        """rows: those of the step that draw."""
        self._rule = rule
        drafts = [each if row.thinking is not None else () for row, each in zip(rows, draws.drafts, strict=True)]
        # By draw: the index among `_guesses`.
        self._guess_of: dict[int, int] = {}
        for first, each in zip(draws.first, drafts, strict=True):
            for place in range(len(each)):
                self._guess_of[first + place] = len(self._guess_of)
        self._guesses = to_device(np.array([guess for each in drafts for guess in each], np.int64), device)
        self._thoughts = self._phases(rows, drafts, device)
        # Which draws gave way to their draft.
        self.taken = torch.zeros(len(draws.rows), dtype=torch.bool, device=device)

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor, draws: Sequence[int]) -> torch.Tensor:
        """The tokens of these draws, with a draft in place of those where it is accepted. Both [draws] int64.

        logits: [draws, vocabulary], with all that changes them in place.
        """
        places = [place for place, draw in enumerate(draws) if draw in self._guess_of]
        if not places:
            return token_ids
        chosen, which = (
            to_device(np.array(each, np.int64), logits.device)
            for each in (places, [self._guess_of[draws[place]] for place in places])
        )
        drawn, guesses = token_ids[chosen], self._guesses[which]
        near = is_candidate(logits[chosen], guesses, self._rule.top_n, self._rule.delta)
        taken = near & self._thoughts[which] & (drawn != guesses)
        token_ids = token_ids.index_copy(0, chosen, torch.where(taken, guesses, drawn))
        self.taken[to_device(np.array([draws[place] for place in places], np.int64), logits.device)] = taken
        return token_ids

    def _phases(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
        """Whether each guess is a thought, by what is known of its row and by the guesses before it: [guesses] bool."""
        width = max((len(each) for each in drafts), default=0)
        if not width:
            return torch.zeros(0, dtype=torch.bool, device=device)
        padded = np.zeros((len(drafts), width), np.int64)
        for line, each in zip(padded, drafts, strict=True):
            line[: len(each)] = each
        before = to_device(np.array([bool(row.thinking) for row in rows], np.int64), device)
        phases = thoughts(to_device(padded, device), before.bool(), self._rule.think_tokens)
        lengths = to_device(np.array([len(each) for each in drafts], np.int64), device)
        return phases[torch.arange(width, device=device) < lengths.unsqueeze(1)]


def thoughts(token_ids: torch.Tensor, before: torch.Tensor, think_tokens: ThinkTokens) -> torch.Tensor:
    """Whether each of the tokens [rows, n] int64 is a thought: [rows, n] bool. before: [rows], whether the first is.

    A token that opens or closes the thinking concerns those behind it.
    """
    opens, closes = token_ids == think_tokens.open, token_ids == think_tokens.close
    places = torch.arange(1, 1 + token_ids.shape[1], device=token_ids.device)
    # The last place up to each that opens or closes; 0 if none does.
    last = torch.where(opens | closes, places, 0).cummax(1).values
    states = torch.cat((before.unsqueeze(1), opens), dim=1)
    return torch.cat((before.unsqueeze(1), states.gather(1, last)[:, :-1]), dim=1)

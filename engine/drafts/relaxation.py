"""Relaxed acceptance: while a model thinks, a draft that is near the likeliest token is taken for the drawn one.

The rule is TensorRT-LLM's for DeepSeek R1: the draft is among the top N, and within delta of the likeliest token's
probability. A row takes part if its request does. If its tokens open or close the thinking, its later drafts follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import Row
from engine.drafts.plan import Draws
from engine.model.context import DeviceState
from engine.model.decode_inputs import NO_ROW
from engine.requests.thinking import ThinkTokens
from kernels.decode_rows import NO_TOKEN
from kernels.host_copy import to_indices
from kernels.sample import is_candidate


@dataclass(frozen=True, slots=True)
class RelaxationRule:
    think_tokens: ThinkTokens
    top_n: int
    delta: float


class Relaxation:
    """The rule, applied to one step. Draws are named by their indices in it."""

    def __init__(
        self, rule: RelaxationRule, rows: Sequence[Row], draws: Draws, drafts: torch.Tensor, state: DeviceState
    ) -> None:
        """rows: those of the step that draw; drafts: [rows or more, n], see `DraftPass`."""
        self._rule, self._draws, self._state = rule, draws, state
        device = state.device
        follows = to_indices([NO_ROW if row.follows is None else row.follows for row in rows], device)
        known = to_indices([bool(row.thinking) for row in rows], device).bool()
        # Whether the token after each row's last known one is a thought: [rows].
        self._before = torch.where(follows == NO_ROW, known, state.thinks[follows.clamp(min=0)])
        # [rows, n]
        self._drafts = drafts[: len(rows)]
        self._thoughts = thoughts(self._drafts, self._before, rule.think_tokens) & (self._drafts != NO_TOKEN)
        # By draw of a row that takes part: the index of its draft in the flattened `_drafts`.
        self._draft_of = {
            first + place: line * drafts.shape[1] + place
            for line, (row, first) in enumerate(zip(rows, draws.first, strict=True))
            for place in range(row.drafts if row.thinking is not None else 0)
        }
        # Which draws were replaced by their draft.
        self.taken = torch.zeros(len(draws.rows), dtype=torch.bool, device=device)

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor, draws: Sequence[int]) -> torch.Tensor:
        """The tokens of these draws, each replaced by its draft if that is accepted. Both [draws] int64.

        logits: [draws, vocabulary], after penalties, biases and masks.
        """
        places = [place for place, draw in enumerate(draws) if draw in self._draft_of]
        if not places:
            return token_ids
        own = [draws[place] for place in places]
        chosen, which = (to_indices(each, logits.device) for each in (places, [self._draft_of[draw] for draw in own]))
        drawn, drafts = token_ids[chosen], self._drafts.flatten()[which]
        near = is_candidate(logits[chosen], drafts.clamp(min=0), self._rule.top_n, self._rule.delta)
        taken = near & self._thoughts.flatten()[which] & (drawn != drafts)
        token_ids = token_ids.index_copy(0, chosen, torch.where(taken, drafts, drawn))
        self.taken[to_indices(own, logits.device)] = taken
        return token_ids

    def note(self, drawn: torch.Tensor, accepted: torch.Tensor) -> None:
        """Keep, for rows that follow these, whether they think after the tokens that they yield. See `Verified`."""
        lines = len(self._draws.drawing)
        after = phases(drawn[:lines], self._before, self._rule.think_tokens)
        last = 1 + accepted[:lines].unsqueeze(1)
        self._state.thinks[to_indices(self._draws.drawing, drawn.device)] = after.gather(1, last).squeeze(1)


def phases(token_ids: torch.Tensor, before: torch.Tensor, think_tokens: ThinkTokens) -> torch.Tensor:
    """Whether the model thinks before each of the tokens [rows, n] int64, and after them: [rows, n + 1] bool.

    before: [rows] bool, whether the model thinks before the first token.
    """
    opens, closes = token_ids == think_tokens.open, token_ids == think_tokens.close
    places = torch.arange(1, 1 + token_ids.shape[1], device=token_ids.device)
    # The last place up to each that opens or closes; 0 if none does.
    last = torch.where(opens | closes, places, 0).cummax(1).values
    states = torch.cat((before.unsqueeze(1), opens), dim=1)
    return torch.cat((before.unsqueeze(1), states.gather(1, last)), dim=1)


def thoughts(token_ids: torch.Tensor, before: torch.Tensor, think_tokens: ThinkTokens) -> torch.Tensor:
    """Whether each of the tokens [rows, n] int64 is a thought: [rows, n] bool. before: [rows], whether the first is.

    A token that opens or closes the thinking concerns those after it.
    """
    return phases(token_ids, before, think_tokens)[:, :-1]

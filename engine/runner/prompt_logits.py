"""Log probabilities of prompts' own tokens, from the hidden states of a step."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from engine.batch import Row
from kernels.host_copy import HostCopies, to_device
from kernels.sample import logprobs
from mesh.domain.outputs import PromptLogprobs

# How many tokens' logits exist at once: at DeepSeek's vocabulary 33 MB in float32, of which a few copies are made.
LOGIT_ROWS = 64


class PendingPromptLogprobs:
    """Log probabilities of the rows that ask for them, while they are copied to the host."""

    def __init__(
        self, rows: Sequence[Row], hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """hidden: [tokens or more, hidden] of the rows' tokens, in their order; logits_of: makes logits [rows,
        vocabulary] of some of these. Every rank of a TP group calls this with the same rows.
        """
        # By row: how many alternatives it reports.
        self._alternatives: dict[int, int] = {}
        self._copies: dict[int, list[HostCopies]] = {}
        offsets = accumulate((row.tokens for row in rows), initial=0)
        for index, (row, offset) in enumerate(zip(rows, offsets, strict=False)):
            if row.prompt_logprobs is not None and (targets := _targets(row)):
                states = hidden[offset : offset + len(targets)]
                self._alternatives[index] = row.prompt_logprobs
                self._copies[index] = list(_scored(states, targets, row.prompt_logprobs, logits_of))

    def read(self) -> Mapping[int, PromptLogprobs]:
        """Wait for the log probabilities, and give them by row."""
        return {
            index: PromptLogprobs.joined(self._alternatives[index], [_part(copies) for copies in parts])
            for index, parts in self._copies.items()
        }


def wanted(rows: Sequence[Row]) -> bool:
    return any(row.prompt_logprobs is not None for row in rows)


def _targets(row: Row) -> list[int]:
    """The tokens that the row's logits score. A row that draws scores nothing after its last token."""
    following = [] if row.next_token is None else [row.next_token]
    return [*row.token_ids[1:], *following]


def _scored(
    states: torch.Tensor, targets: Sequence[int], alternatives: int, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> "list[HostCopies]":
    token_ids = to_device(np.array(targets, np.int64), states.device)
    copies = []
    for some, tokens in zip(states.split(LOGIT_ROWS), token_ids.split(LOGIT_ROWS), strict=True):
        logits = logits_of(some)
        own, top_ids, top = logprobs(logits, tokens, min(alternatives, logits.shape[1]))
        ranks = 1 + (logits > logits.gather(1, tokens.unsqueeze(1))).sum(1)
        copies.append(HostCopies((own, ranks.int(), top_ids.int(), top)))
    return copies


def _part(copies: HostCopies) -> PromptLogprobs:
    own, ranks, top_ids, top = (values.numpy() for values in copies.read())
    return PromptLogprobs(top.shape[1], *(values.tobytes() for values in (own, ranks, top_ids, top)))

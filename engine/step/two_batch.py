"""Whether a step is computed as two micro-batches: one's tokens travel between ranks while the other is computed."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TwoBatch:
    """Equal on all ranks, which ask it of what they have agreed on."""

    # For ascending numbers of tokens, whether a step with that many is computed in two: steps that only decode, and
    # others. If empty, no such step is.
    decoding: Sequence[tuple[int, bool]] = ()
    prompts: Sequence[tuple[int, bool]] = ()

    def wanted(self, tokens: int, *, decode_only: bool) -> bool:
        """The entry for the nearest number that is no smaller decides, or else that for the largest."""
        known = self.decoding if decode_only else self.prompts
        if tokens < 2 or not known:
            return False
        numbers = [number for number, _ in known]
        return known[min(bisect_left(numbers, tokens), len(known) - 1)][1]


NEVER = TwoBatch()
ALWAYS = TwoBatch(decoding=[(2, True)], prompts=[(2, True)])

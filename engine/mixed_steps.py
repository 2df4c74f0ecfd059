"""How many tokens of prompts a step computes beside requests that decode: so that it ends in a set time, and so that
prompts take no more than a set share of the time.
"""

from collections.abc import Sequence

from engine.smoothing import SmoothedRatio
from mesh.blocks import BLOCK_TOKENS
from mesh.tails import MOST_TOKENS

# Before any step with prompts has been measured.
FIRST_TOKENS = 4 * BLOCK_TOKENS
# So many are computed by every step that computes any, whatever it takes.
FEWEST_TOKENS = 16
# Weight of the past against one more step. What a token takes grows with the tokens before it.
DECAY = 0.5
# What is left of a chunk's costs with each step whose prompts are rows of a graph: then chunks are tried again.
FORGETTING = 0.99


class MixedSteps:
    """Learns what steps take without prompts, and what a token of a prompt adds.

    That includes its share of what prompts cost however short they are: so the number comes near the right one from
    step to step, the more slowly the more of the time this is. A prompt whose tokens have many before them costs much
    however few it computes at once: its chunks are better large and rare, which a share of the time allows.

    So few tokens that they are rows of a captured graph cost neither what chunks cost, whose attention at least the
    host launches, nor in proportion to them. They are taken where a chunk of more does not end in time.
    """

    def __init__(self, step_ms: float | None, prompt_share: float | None = None) -> None:
        """step_ms: how long a step with both may take; None is as long as it takes. prompt_share: the most of the time
        that prompts may take from requests that decode, below 1; None is all.
        """
        self._step_ms = step_ms
        # How long requests decode for each millisecond that prompts have taken.
        self._decode_ms = None if prompt_share is None else (1 - prompt_share) / prompt_share
        self._without_ms = SmoothedRatio()
        self._token_ms = SmoothedRatio()
        # The same of tokens that are rows of a graph.
        self._row_ms = SmoothedRatio()
        # Grows while no chunk shows what its tokens take.
        self._forgotten = 1.0
        # For how long requests decode alone before prompts go on.
        self._owed_ms = 0.0
        # Steps with both that were launched and not observed: what they will owe is not known.
        self._under_way = 0
        # What `agreed` was told last; None without other ranks.
        self._all_owe: bool | None = None
        # What the step before such a one took longer: its end is seen late if the host launches the next one meanwhile.
        self._early_ms = 0.0

    def launched(self, prompt_tokens: int, decodes: bool) -> None:
        """A step that `observe` gets later."""
        self._under_way += bool(self._bounds and prompt_tokens and decodes)

    def observe(self, seconds: float, prompt_tokens: int, decodes: bool = True, row_tokens: int = 0) -> None:
        """prompt_tokens: the most that any rank computed in chunks of prompts. decodes: some rank decoded. row_tokens:
        of prompts, computed here as rows of a graph; there are no chunks then.
        """
        if not self._bounds:
            return
        ms, without_ms = seconds * 1000, self._without_ms.value or 0.0
        decode_ms = min(ms, without_ms)
        if prompt_tokens:
            taken_ms, self._early_ms = self._early_ms + ms - decode_ms, 0.0
            self._token_ms.observe(taken_ms, prompt_tokens, DECAY)
            self._forgotten = 1.0
            if decodes:
                self._under_way -= 1
                if self._decode_ms is not None:
                    self._owed_ms = max(self._owed_ms + taken_ms * self._decode_ms - decode_ms, 0.0)
            return
        if self._under_way:
            self._early_ms += ms - decode_ms
        elif row_tokens:
            self._row_ms.observe(ms - decode_ms, row_tokens, DECAY)
            self._forgotten *= FORGETTING
        else:
            decode_ms = ms
            self._without_ms.observe(ms, 1.0, DECAY)
        self._owed_ms = max(self._owed_ms - decode_ms, 0.0)

    def observe_decode_steps(self, seconds: Sequence[float]) -> None:
        """Steps one after the other that computed nothing of prompts."""
        if not self._bounds:
            return
        self._without_ms.observe_all([each * 1000 for each in seconds], 1.0, [DECAY] * len(seconds))
        self._owed_ms = max(self._owed_ms - sum(seconds) * 1000, 0.0)

    @property
    def _bounds(self) -> bool:
        return self._step_ms is not None or self._decode_ms is not None

    @property
    def owes(self) -> bool:
        """Whether prompts are to wait behind the next step too, by this rank's clock."""
        pays_ms = self._without_ms.value or 0.0
        return self._decode_ms is not None and (self._owed_ms > pays_ms or bool(self._under_way))

    def agreed(self, owes: bool) -> None:
        """owes: whether some of several ranks said so before the last step, or that step has chunks of prompts.

        Their prompts go on in the same step. A rank whose clock is behind would otherwise find each time that others
        have just begun the next prompt, and never begin one.
        """
        self._all_owe = owes

    @property
    def waits(self) -> bool:
        """Whether prompts wait until requests have decoded for as long as they are to.

        With several ranks what all know decides, and no rank's clock: what one still owes when all go on is added to
        what it owes behind that step, and a step without chunks follows each that has some.
        """
        if self._decode_ms is None:
            return False
        return bool(self._owed_ms or self._under_way) if self._all_owe is None else self._all_owe

    def most_prompt_tokens(self, rows_left: int) -> int | None:
        """How many each rank may compute in the next step, beside requests that decode; None if nothing bounds them.
        rows_left: rows of the largest graph that no request takes; 0 if prompts are no rows.
        """
        if self.waits:
            return 0
        if self._step_ms is None:
            return None
        room_ms = self._step_ms - (self._without_ms.value or 0.0)
        token_ms, row_ms = self._token_ms.value, self._row_ms.value
        chunk = FIRST_TOKENS if token_ms is None else int(room_ms / (token_ms * self._forgotten))
        most_rows = min(rows_left, MOST_TOKENS)
        if chunk > most_rows or most_rows < FEWEST_TOKENS:
            return max(chunk, FEWEST_TOKENS)
        return min(max(int(room_ms / row_ms) if row_ms else 0, FEWEST_TOKENS), most_rows)

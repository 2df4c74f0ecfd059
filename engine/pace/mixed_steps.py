"""How many tokens of prompts a step computes while requests decode. A step may have a time to end in, and
prompts a share of the time that they may take at most.
"""

from collections.abc import Sequence

from engine.pace.smoothing import SmoothedRatio
from mesh.blocks import BLOCK_TOKENS
from mesh.tails import MOST_TOKENS

# The bound before any step with prompts has been measured.
FIRST_TOKENS = 4 * BLOCK_TOKENS
# Every step that computes any prompt tokens may compute this many, however long that takes.
FEWEST_TOKENS = 16
# Weight of the past against one more step. It is low because tokens cost more the more tokens are before them.
DECAY = 0.5
# Factor on the estimated cost of a chunk after each step whose prompts are rows of a graph, so that chunks are tried
# again.
FORGETTING = 0.99


class MixedSteps:
    """Learns how long steps take without prompts, and what each token of a prompt adds.

    What a token adds includes its share of what any chunk costs, however short. So the bound approaches the right
    number from step to step, the more slowly the larger this fixed cost is. A prompt with many tokens before its chunk
    costs much however small the chunk is: its chunks are better large and rare, which a share of the time allows.

    A few tokens may be rows of a captured graph. They do not have the fixed cost of a chunk, whose attention at least
    the host launches, and their cost does not grow in proportion to their number. They are taken where a larger chunk
    would not end in time.
    """

    def __init__(self, step_ms: float | None, prompt_share: float | None = None) -> None:
        """step_ms: how long a step with both may take; None if it has no bound. prompt_share: the largest share of the
        time that prompts may take from requests that decode, below 1; None if it has no bound.
        """
        self._step_ms = step_ms
        # How many milliseconds requests decode for each one that prompts have taken.
        self._decode_ms = None if prompt_share is None else (1 - prompt_share) / prompt_share
        self._without_ms = SmoothedRatio()
        self._token_ms = SmoothedRatio()
        # What each prompt token adds that is a row of a graph.
        self._row_ms = SmoothedRatio()
        # Factor on `_token_ms`. It falls while no chunk shows what its tokens take.
        self._forgotten = 1.0
        # How many milliseconds requests decode alone before prompts go on.
        self._owed_ms = 0.0
        # How many steps with both were launched and not observed: how much time they will owe is not known.
        self._under_way = 0
        # What `agreed` was last called with; None if there are no other ranks.
        self._all_owe: bool | None = None
        # The extra time of steps just before one with prompts: the host sees their end late if it launches that one
        # meanwhile.
        self._early_ms = 0.0

    def launched(self, chunks: bool, decodes: bool) -> None:
        """Note a step that `observe` is called for later. chunks: whether some rank computes chunks of prompts."""
        self._under_way += self._bounds and chunks and decodes

    def observe(self, seconds: float, prompt_tokens: int, decodes: bool = True, row_tokens: int = 0) -> None:
        """prompt_tokens: the most that any rank computed in chunks of prompts. decodes: whether some rank decoded.
        row_tokens: how many tokens of prompts this rank computed as rows of a graph; there are no chunks then.
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
        """Note consecutive steps that computed no prompt tokens."""
        if not self._bounds:
            return
        self._without_ms.observe_all([each * 1000 for each in seconds], 1.0, [DECAY] * len(seconds))
        self._owed_ms = max(self._owed_ms - sum(seconds) * 1000, 0.0)

    @property
    def _bounds(self) -> bool:
        return self._step_ms is not None or self._decode_ms is not None

    @property
    def owes(self) -> bool:
        """Whether prompts must wait after the next step too, by this rank's clock."""
        pays_ms = self._without_ms.value or 0.0
        return self._decode_ms is not None and (self._owed_ms > pays_ms or bool(self._under_way))

    def agreed(self, owes: bool) -> None:
        """owes: whether some of several ranks owed time before the last step, or that step has chunks of prompts.

        All ranks' prompts go on in the same step. A rank whose clock is late would otherwise find each time that
        others have just begun the next prompt, and would never begin one.
        """
        self._all_owe = owes

    @property
    def waits(self) -> bool:
        """Whether prompts wait until requests have decoded for long enough.

        With several ranks, what all have agreed on decides, and no rank's own clock. If a rank still owes time when all
        go on, that is added to what it owes after that step. A step without chunks follows each step with chunks.
        """
        if self._decode_ms is None:
            return False
        return bool(self._owed_ms or self._under_way) if self._all_owe is None else self._all_owe

    def most_prompt_tokens(self, rows_left: int) -> int | None:
        """How many prompt tokens each rank may compute in the next step while requests decode; None if unbounded.

        rows_left: rows of the largest graph that no request takes; 0 if prompts cannot be rows of a graph.
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

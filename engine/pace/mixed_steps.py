"""How many tokens of prompts a step computes while requests decode. A step may have a time to end in, and
prompts a share of the time that they may take at most.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from engine.pace.smoothing import SmoothedRatio
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.workers import WorkerSpeed
from mesh.tails import MOST_TOKENS

# "auto": how many times as long as a step without prompts a step with both may take. Then 99% of the tokens come within
# 2.5 times the median.
EVEN = 2.1
# "auto": one rank has even steps if steps of at least this many tokens are captured: the host takes longer than the
# device to launch others. A CPU captures none; its decode steps take the longer the more requests there are.
FEWEST_CAPTURED = 4096
# "auto": steps are whole while no more than this many answers run for each prompt that waits after the first. Few
# tokens come late then, and more answers share each later step.
FEW_ANSWERS = 4
# "auto": prompts are computed within about this many steps: while more prompts come than even steps compute, first
# tokens would otherwise come ever later.
MOST_STEPS = 12
# "auto": the tokens of a chunk take at least this many times as long as what any chunk adds, however short.
WORTHWHILE = 3.0
# The bound before any step with prompts has been measured.
FIRST_TOKENS = 4 * BLOCK_TOKENS
# Every step that computes any prompt tokens may compute this many, however long that takes.
FEWEST_TOKENS = 16
# Weight of the past against one more step with prompts. It is low because tokens cost more the more tokens are before
# them.
DECAY = 0.5
# What a step takes without prompts, and what chunks add besides their tokens, are medians of this many steps: some have
# a few tokens of another rank's prompt, and some seem long because the host was late. After as many steps with prompts
# on end, those show what a step without them would take.
SEEN = 9
# Factor on the estimated cost of a chunk after each step whose prompts are rows of a graph, so that chunks are tried
# again.
FORGETTING = 0.99


class MostTokens(NamedTuple):
    """How many prompt tokens a rank may compute in a step while requests decode; None if it is not bounded."""

    # In all, and apart from a chunk that all ranks compute together.
    all: int | None
    alone: int | None


UNBOUNDED = MostTokens(None, None)


class ChunkCosts:
    """What chunks of one kind add to a step: a time for each of their tokens, and one that does not depend on them.

    The second is below 0 where a step with both reads weights once that two steps would read twice.
    """

    def __init__(self, token_ms: float | None) -> None:
        """token_ms: what a token takes in a large step; None if unknown. Each token's share of all that chunks add is
        learned then, and nothing else is taken to be added.
        """
        self._token_ms = token_ms
        self._shared_ms = SmoothedRatio()
        # Nothing, before some chunks have shown what they add.
        self._fixed_ms = deque([0.0] * SEEN, SEEN)

    def adds(self, tokens: int) -> float | None:
        """How many milliseconds these tokens add; None if a token's are unknown."""
        return None if self._token_ms is None else self._token_ms * tokens + median(self._fixed_ms)

    def observe(self, taken_ms: float, tokens: int) -> None:
        self._shared_ms.observe(taken_ms, tokens, DECAY)
        if self._token_ms is not None:
            self._fixed_ms.append(taken_ms - self._token_ms * tokens)

    def ending_in(self, room_ms: float, forgotten: float = 1.0, worthwhile: float = 0.0) -> int:
        """How many tokens add this long. forgotten: factor on what was measured. worthwhile: they take at least this
        many times as long as what does not depend on them.
        """
        token_ms, fixed_ms = self._token_ms or self._shared_ms.value, median(self._fixed_ms) * forgotten
        if token_ms is None:
            return FIRST_TOKENS
        if self._token_ms is None:
            token_ms *= forgotten
        return max(int(max(room_ms - fixed_ms, worthwhile * fixed_ms) / token_ms), 0)


class MixedSteps:
    """Learns how long steps take without prompts, and what each token of a prompt adds.

    A prompt with many tokens before its chunk costs much however small the chunk is: its chunks are better large and
    rare, which a share of the time allows.

    A few tokens may be rows of a captured graph. They do not have the fixed cost of a chunk, whose attention at least
    the host launches, and their cost does not grow in proportion to their number. They are taken where a larger chunk
    would not end in time.

    A chunk that all ranks compute together costs less for each token than smaller ones, and is never made smaller than
    `divided_tokens` for the sake of a bound.
    """

    def __init__(
        self,
        step_ms: float | Literal["auto"] | None,
        prompt_share: float | None = None,
        divided_tokens: int | None = None,
        speed: WorkerSpeed | None = None,
        ranks: int = 1,
    ) -> None:
        """step_ms: how long a step with both may take: "auto" goes by what steps without prompts take; None if it has
        no bound. prompt_share: the largest share of the time that prompts may take from requests that decode, below 1;
        None if it has no bound. divided_tokens: the fewest tokens of a chunk that all ranks compute together; None if
        there is none. speed: what was measured before the first step; None if nothing was. ranks: how many compute such
        a chunk together.
        """
        self._step_ms = step_ms
        self._divided_tokens = divided_tokens
        # How many milliseconds requests decode for each one that prompts have taken.
        self._decode_ms = None if prompt_share is None else (1 - prompt_share) / prompt_share
        # What the last steps without prompts took, and how many steps with both there were since.
        self._quiet_ms = deque[float](maxlen=SEEN)
        self._since_quiet = 0
        # Chunks that this rank computes alone, and those that all ranks compute together.
        token_ms = None if speed is None else 1000 / speed.prompts.tokens_per_second
        self._alone, self._divided = ChunkCosts(token_ms), ChunkCosts(None if token_ms is None else token_ms / ranks)
        # What each prompt token adds that is a row of a graph.
        self._row_ms = SmoothedRatio()
        # Factor on the cost of a chunk. It falls while no chunk shows what its tokens take.
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
        if speed is not None:
            self._quiet_ms.append(speed.decode_step_ms)

    def launched(self, chunks: bool, decodes: bool) -> None:
        """Note a step that `observe` is called for later. chunks: whether some rank computes chunks of prompts."""
        self._under_way += self._bounds and chunks and decodes

    def observe(self, seconds: float, prompt_tokens: int, decodes: bool = True, row_tokens: int = 0) -> None:
        """prompt_tokens: the most that any rank computed in chunks of prompts. decodes: whether some rank decoded.
        row_tokens: how many tokens of prompts this rank computed as rows of a graph; there are no chunks then.
        """
        if not self._bounds:
            return
        ms, without_ms = seconds * 1000, self._without_ms
        decode_ms = min(ms, without_ms)
        if prompt_tokens:
            taken_ms, self._early_ms = self._early_ms + ms - (decode_ms if decodes else 0.0), 0.0
            self._forgotten = 1.0
            if decodes:
                self._observe_both(taken_ms, prompt_tokens)
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
            self._observe_quiet([ms])
        self._owed_ms = max(self._owed_ms - decode_ms, 0.0)

    def observe_decode_steps(self, seconds: Sequence[float]) -> None:
        """Note consecutive steps that computed no prompt tokens."""
        if not self._bounds:
            return
        self._observe_quiet([each * 1000 for each in seconds[-SEEN:]])
        self._owed_ms = max(self._owed_ms - sum(seconds) * 1000, 0.0)

    def _observe_both(self, taken_ms: float, tokens: int) -> None:
        """taken_ms: by how much a step with this many tokens of chunks was longer than one without is thought to be.

        While answers begin and end, and no step shows what they take alone, that grows old.
        """
        self._since_quiet += 1
        costs = self._divided if self._divided_tokens is not None and tokens >= self._divided_tokens else self._alone
        added_ms = costs.adds(tokens)
        if added_ms is None or self._since_quiet <= SEEN:
            costs.observe(taken_ms, tokens)
        else:
            self._quiet_ms.append(max(self._without_ms + taken_ms - added_ms, 0.0))

    def _observe_quiet(self, ms: Sequence[float]) -> None:
        self._quiet_ms.extend(ms)
        self._since_quiet = 0

    @property
    def _without_ms(self) -> float:
        """What a step without prompts takes; 0 while unknown."""
        return median(self._quiet_ms) if self._quiet_ms else 0.0

    @property
    def _bounds(self) -> bool:
        return self._step_ms is not None or self._decode_ms is not None

    @property
    def owes(self) -> bool:
        """Whether prompts must wait after the next step too, by this rank's clock."""
        pays_ms = self._without_ms
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

    def most_prompt_tokens(
        self, rows_left: int, queued_tokens: int = 0, prompts: int = 0, decoding: int = 1
    ) -> MostTokens:
        """How many prompt tokens this rank may compute in the next step while requests decode.

        rows_left: rows of the largest graph that no request takes; 0 if prompts cannot be rows of a graph.
        queued_tokens, prompts: what is left to compute here, and of how many prompts. decoding: how many requests
        decode here.
        """
        if self.waits:
            return MostTokens(0, 0)
        if self._step_ms is None:
            return UNBOUNDED
        step_ms, without_ms, worthwhile, least = self._step_ms, self._without_ms, 0.0, 0
        if step_ms == "auto":
            if not without_ms or decoding <= FEW_ANSWERS * (prompts - 1):
                # Without a step that decodes it is not known how long that takes.
                return UNBOUNDED
            step_ms, worthwhile, least = EVEN * without_ms, WORTHWHILE, -(-queued_tokens // MOST_STEPS)
        room_ms = step_ms - without_ms
        alone = self._most_alone(room_ms, rows_left, worthwhile)
        if self._divided_tokens is None:
            return MostTokens(max(alone, least), max(alone, least))
        divided = self._divided.ending_in(room_ms, worthwhile=worthwhile)
        return MostTokens(max(divided, least, self._divided_tokens), max(alone, least))

    def _most_alone(self, room_ms: float, rows_left: int, worthwhile: float) -> int:
        chunk, row_ms = self._alone.ending_in(room_ms, self._forgotten, worthwhile), self._row_ms.value
        most_rows = min(rows_left, MOST_TOKENS)
        if chunk > most_rows or most_rows < FEWEST_TOKENS:
            return max(chunk, FEWEST_TOKENS)
        return min(max(int(room_ms / row_ms) if row_ms else 0, FEWEST_TOKENS), most_rows)

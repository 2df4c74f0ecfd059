"""How many tokens of prompts a step computes while requests decode. A step may have a time to end in, and
prompts a share of the time that they may take at most.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from engine.pace.smoothing import SmoothedRatio
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.workers import WorkerSpeed
from mesh.tails import MOST_TOKENS

# "auto": how many times as long as a step without prompts a step with both may take. Then 99% of the tokens come within
# 2.5 times the median.
EVEN = 2.2
# "auto": one rank has even steps if steps of at least this many tokens are captured. Else smaller chunks take the host
# about as long to launch as whole prompts, or a CPU, whose decode steps take the longer the more requests there are.
FEWEST_CAPTURED = 4096
# "auto": prompts are computed within about this many steps: while more prompts come than even steps compute, first
# tokens would otherwise come ever later. Steps are no longer for it than those that are captured, if any is, since
# larger ones compute no more tokens a second, and shorter ones made first tokens come sooner.
MOST_STEPS, MOST_CAPTURED_STEPS = 8, 12
# "auto": the tokens of a chunk take at least this many times as long as what any chunk adds, however short.
WORTHWHILE = 3.0
# The bound before any step with prompts has been measured.
FIRST_TOKENS = 4 * BLOCK_TOKENS
# Every step that computes any prompt tokens may compute this many, however long that takes.
FEWEST_TOKENS = 16
# Weight of the past against one more step with prompts. It is low because tokens cost more the more tokens are before
# them.
DECAY = 0.5
# The same of a step without. It is high because some of them have a few tokens of another rank's prompt.
QUIET_DECAY = 0.9
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
    """What chunks of one kind add to a step.

    Attributes:
        token_ms: for each of their tokens, its share of what any chunk adds included.
        fixed_ms: what any chunk adds, however short. Known only if `large_ms` is.
    """

    def __init__(self) -> None:
        self.token_ms, self.fixed_ms = SmoothedRatio(), SmoothedRatio()

    def observe(self, taken_ms: float, tokens: int, large_ms: float | None) -> None:
        """large_ms: milliseconds of a prompt token in a large step; None if unknown."""
        self.token_ms.observe(taken_ms, tokens, DECAY)
        if large_ms is not None:
            self.fixed_ms.observe(taken_ms - large_ms * tokens, 1.0, DECAY)

    def worthwhile(self, large_ms: float) -> int:
        """The fewest tokens of a chunk that take WORTHWHILE times as long as what any chunk adds; 0 if unknown."""
        return int(max(self.fixed_ms.value or 0.0, 0.0) * WORTHWHILE / large_ms)


class MixedSteps:
    """Learns how long steps take without prompts, and what each token of a prompt adds.

    What a token adds includes its share of what any chunk costs, however short. So the bound approaches the right
    number from step to step, the more slowly the larger this fixed cost is. A prompt with many tokens before its chunk
    costs much however small the chunk is: its chunks are better large and rare, which a share of the time allows.

    A few tokens may be rows of a captured graph. They do not have the fixed cost of a chunk, whose attention at least
    the host launches, and their cost does not grow in proportion to their number. They are taken where a larger chunk
    would not end in time.

    Chunks of steps that are captured cost less than those of somewhat larger steps, which the host launches, so the two
    are measured apart: where no larger chunk would end in time, the step is one that is captured. Up to half of the
    largest of these the host takes as long to launch it as the device to compute it, so a smaller one is no quicker.

    A chunk that all ranks compute together costs less for each token than smaller ones, and is never made smaller than
    `divided_tokens` for the sake of a bound.
    """

    def __init__(
        self,
        step_ms: float | Literal["auto"] | None,
        prompt_share: float | None = None,
        divided_tokens: int | None = None,
        speed: WorkerSpeed | None = None,
        captured_tokens: int = 0,
    ) -> None:
        """step_ms: how long a step with both may take: "auto" goes by what steps without prompts take; None if it has
        no bound. prompt_share: the largest share of the time that prompts may take from requests that decode, below 1;
        None if it has no bound. divided_tokens: the fewest tokens of a chunk that all ranks compute together; None if
        there is none. speed: what was measured before the first step. captured_tokens: see
        `engine.batch.Backend.captured_prompt_tokens`.
        """
        self._step_ms = step_ms
        self._captured_tokens = captured_tokens
        self._divided_tokens = divided_tokens
        # How many milliseconds requests decode for each one that prompts have taken.
        self._decode_ms = None if prompt_share is None else (1 - prompt_share) / prompt_share
        self._without_ms = SmoothedRatio()
        # Chunks that this rank computes alone, launched and captured, and those that all ranks compute together.
        self._alone, self._captured, self._divided = ChunkCosts(), ChunkCosts(), ChunkCosts()
        # Milliseconds of a prompt token in a large step; None if unknown.
        self._large_ms: float | None = None
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
        if speed is not None and step_ms == "auto":
            self._without_ms.observe(speed.decode_step_ms, 1.0, QUIET_DECAY)
            self._large_ms = 1000 / speed.prompts.tokens_per_second
            self._alone.token_ms.observe(self._large_ms, 1.0, DECAY)

    def launched(self, chunks: bool, decodes: bool) -> None:
        """Note a step that `observe` is called for later. chunks: whether some rank computes chunks of prompts."""
        self._under_way += self._bounds and chunks and decodes

    def observe(
        self, seconds: float, prompt_tokens: int, decodes: bool = True, row_tokens: int = 0, step_tokens: int = 0
    ) -> None:
        """prompt_tokens: the most that any rank computed in chunks of prompts. decodes: whether some rank decoded.
        row_tokens: how many tokens of prompts this rank computed as rows of a graph; there are no chunks then.
        step_tokens: the most that any rank computed in all.
        """
        if not self._bounds:
            return
        ms, without_ms = seconds * 1000, self._without_ms.value or 0.0
        decode_ms = min(ms, without_ms)
        if prompt_tokens:
            taken_ms, self._early_ms = self._early_ms + ms - (decode_ms if decodes else 0.0), 0.0
            if decodes or not self._captured_tokens:
                # A whole step of prompts alone would make one seem cheap that is a little larger than those captured.
                self._costs(prompt_tokens, step_tokens).observe(taken_ms, prompt_tokens, self._large_ms)
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
            self._without_ms.observe(ms, 1.0, QUIET_DECAY)
        self._owed_ms = max(self._owed_ms - decode_ms, 0.0)

    def observe_decode_steps(self, seconds: Sequence[float]) -> None:
        """Note consecutive steps that computed no prompt tokens."""
        if not self._bounds:
            return
        self._without_ms.observe_all([each * 1000 for each in seconds], 1.0, [QUIET_DECAY] * len(seconds))
        self._owed_ms = max(self._owed_ms - sum(seconds) * 1000, 0.0)

    def _costs(self, prompt_tokens: int, step_tokens: int) -> ChunkCosts:
        if self._divided_tokens is not None and prompt_tokens >= self._divided_tokens:
            return self._divided
        return self._captured if 0 < step_tokens <= self._captured_tokens else self._alone

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

    def most_prompt_tokens(self, rows_left: int, queued_tokens: int = 0, decoding: int = 0) -> MostTokens:
        """How many prompt tokens this rank may compute in the next step while requests decode.

        rows_left: rows of the largest graph that no request takes; 0 if prompts cannot be rows of a graph.
        queued_tokens: prompt tokens that are left to compute here. decoding: how many tokens requests here decode.
        """
        if self.waits:
            return MostTokens(0, 0)
        if self._step_ms is None:
            return UNBOUNDED
        step_ms, without_ms, least = self._step_ms, self._without_ms.value or 0.0, 0
        captured_left = self._captured_tokens - decoding
        if step_ms == "auto":
            if not without_ms:
                # No request has decoded yet, so it is not known how long that takes.
                return UNBOUNDED
            step_ms = EVEN * without_ms
            least = -(-queued_tokens // MOST_STEPS)
            if captured_left > 0:
                least = min(-(-queued_tokens // MOST_CAPTURED_STEPS), captured_left)
        alone = self._most_alone(step_ms - without_ms, rows_left, captured_left)
        if self._divided_tokens is None:
            return MostTokens(max(alone, least), max(alone, least))
        divided_ms = self._divided.token_ms.value
        divided = int((step_ms - without_ms) / divided_ms) if divided_ms else 0
        return MostTokens(max(divided, self._divided_tokens), alone)

    def _worthwhile(self, costs: ChunkCosts) -> int:
        """The fewest tokens of a chunk whose own time is long enough compared with what any chunk adds. Smaller ones
        would make steps hardly shorter, and prompts much longer. 0 if unknown.
        """
        if self._large_ms is None or self._step_ms != "auto":
            return 0
        return costs.worthwhile(self._large_ms)

    def _ending_in(self, room_ms: float, costs: ChunkCosts) -> int:
        """The tokens of a chunk that takes this long."""
        token_ms = costs.token_ms.value
        return FIRST_TOKENS if token_ms is None else int(room_ms / (token_ms * self._forgotten))

    def _most_alone(self, room_ms: float, rows_left: int, captured_left: int) -> int:
        """captured_left: prompt tokens of the largest step that is captured; none if it is not above 0."""
        chunk, row_ms = self._ending_in(room_ms, self._alone), self._row_ms.value
        if captured_left <= 0 or chunk > captured_left:
            chunk = max(chunk, self._worthwhile(self._alone))
        else:
            fits = self._ending_in(room_ms, self._captured if self._captured.token_ms.value else self._alone)
            fewest = self._captured_tokens // 2 if self._step_ms == "auto" else 0
            chunk = min(max(fits, self._worthwhile(self._captured), fewest), captured_left)
        most_rows = min(rows_left, MOST_TOKENS)
        if chunk > most_rows or most_rows < FEWEST_TOKENS:
            return max(chunk, FEWEST_TOKENS)
        return min(max(int(room_ms / row_ms) if row_ms else 0, FEWEST_TOKENS), most_rows)

"""How many prompt tokens each step takes, and how many drafts."""

from collections.abc import Sequence

import msgspec

from engine.backend import Backend
from engine.config import EngineConfig
from engine.pace.alignment import Alignment
from engine.pace.draft_depth import DraftDepth
from engine.pace.mixed_steps import FEWEST_CAPTURED, MixedSteps, MostTokens
from engine.pace.step_meter import NO_PROMPTS, StepMeter
from engine.pace.tails import Tails
from engine.pace.turns import LONG_PROMPT, Turns
from engine.parallel.layout import Layout
from engine.plan.step_plan import PromptLimits, PromptsAhead, PromptsLeft
from engine.protocol.messages import DraftCounts
from engine.step.pipeline import CollectedStep
from engine.step.shape import StepShape
from engine.step.step_work import Proposal, StepWork


class Pacing:
    """Asks the policies that bound a step's prompts and drafts, and tells them how each step went.

    For each step the engine calls `limits`, plans, calls `propose`, and then `agreed` with the shape that all ranks
    launch. It calls `collected` once the step's samples are there, which with overlap is after `agreed` of the step
    that follows. No other class writes the policies or the meter:

        Alignment   waiting prompts begin together with those of other ranks
        MixedSteps  prompts leave requests that decode their time
        Turns       long prompts that all ranks compute together go one after another
        Tails       few tokens of a prompt are computed as rows that decode
        DraftDepth  the number of drafts that brings most tokens a second

    Attributes:
        meter: what steps took, for the service.
    """

    def __init__(self, config: EngineConfig, backend: Backend, rank: int = 0) -> None:
        """rank: number of this rank among the dp ranks of its worker."""
        self.meter = StepMeter()
        ranks, divided_tokens = Layout.of(config.parallel).dp, config.parallel.divided_tokens
        self._alignment = Alignment(ranks, config.parallel.prompt_wait_steps)
        step_ms = config.bounded_step_ms
        if step_ms == "auto" and backend.captured_prompt_tokens < (FEWEST_CAPTURED if ranks == 1 else 1):
            step_ms = None
        # At once each rank's prompts hold up answers for longer, and take less time if all ranks have some.
        in_turns = divided_tokens is not None and config.aim != "throughput"
        self._turns = Turns(ranks, rank) if in_turns else None
        self._mixed_steps = MixedSteps(step_ms, config.prompt_share, divided_tokens, backend.speed, ranks)
        self._tails = Tails(backend.captured_rows, backend.draft_layers)
        self._depth = DraftDepth(config.drafts.most, backend.step_times)
        self._divided_tokens = divided_tokens
        # The shape of the step that was agreed on last.
        self._shape = StepShape(0)

    def limits(self, decoding: int, ahead: PromptsAhead) -> PromptLimits:
        """What prompts may take of the next step, before which this many requests decode here."""
        most = self._most(self._tails.rows_left(decoding), decoding, ahead)
        return PromptLimits(
            self._alignment.opens,
            self._divided_tokens,
            most_tokens=most.all,
            most_alone=most.alone,
            long_tokens=None if self._turns is None else LONG_PROMPT,
            turn=self._turns is None or self._turns.open,
            decodes=self._others_decode,
        )

    def even_step_tokens(self, decoding: int, ahead: PromptsAhead) -> int | None:
        """The most prompt tokens of a step, as for `limits`; None if only `max_step_tokens` bounds them."""
        return self._most(0, decoding, ahead).all or None

    def depth(self, decoding: int) -> int:
        """How many tokens a step in which this many requests decode guesses after each that it draws."""
        return self._depth.choose(decoding)

    def _most(self, rows_left: int, decoding: int, ahead: PromptsAhead) -> MostTokens:
        # A step holds up the answers that decode here, or one if only other ranks have some.
        answers = decoding or int(self._others_decode)
        # Ranks that take turns wait for one another's prompts, of which each has about as many tokens.
        sharing = 1 if self._turns is None else max(self._turns.dividing, 1)
        return self._mixed_steps.most_prompt_tokens(rows_left, ahead.tokens * sharing, ahead.prompts, answers)

    @property
    def _others_decode(self) -> bool:
        """Whether some rank of several decoded in the step agreed on last. One rank knows its own requests."""
        return self._alignment.ranks > 1 and self._shape.decodes

    def propose(self, work: StepWork, prompts: PromptsLeft, stopping: bool) -> Proposal:
        """prompts: what the work leaves of prompts here. stopping: whether this rank wants to end."""
        decodes = self._others_decode or bool(work.decoding)
        # While some request decodes, prompts also wait until requests have had back the time that prompts took.
        held_back = (prompts.wait and not self._alignment.opens) or (decodes and self._mixed_steps.waits)
        shape = work.shape(stopping, self._tails, prompts.wait, self._mixed_steps.owes)
        if self._turns is not None:
            begun = prompts.longest_begun >= LONG_PROMPT
            own = begun or prompts.longest_next >= LONG_PROMPT
            held_back = held_back or (own and decodes and not self._turns.open)
            self._turns = self._turns.proposing(own, begun)
            if own:
                shape = msgspec.structs.replace(shape, dividing=1, begun=int(begun))
        return Proposal(work, shape, held_back)

    def agreed(self, shape: StepShape) -> None:
        """All ranks launch a step of this shape next."""
        chunks = not shape.decode_only
        self._alignment = self._alignment.after(shape)
        if self._alignment.ranks > 1:
            self._mixed_steps.agreed(shape.owes or (chunks and shape.decodes))
        if self._turns is not None:
            self._turns = self._turns.after(shape)
        self._mixed_steps.launched(chunks, shape.decodes)
        self._shape = shape

    def collected(self, collected: CollectedStep, drafts: DraftCounts | None) -> None:
        """drafts: what became of the step's drafts; None if it has none of requests that go on."""
        step, seconds = collected.step, collected.seconds
        shape, decoding = step.shape, len(step.work.decoding)
        row_tokens = step.work.prompt_tokens if shape.decode_only else 0
        # A step whose prompts are rows took as long as one with as many more requests. It does not show how fast
        # prompts are computed.
        prompts = NO_PROMPTS if decoding and shape.decode_only else step.prompts
        # A step seems longer than it was if the next one has prompts: the host launches that one first, and sees this
        # one's end late. Without overlap the step agreed on last is this one.
        quiet = shape.decode_only and self._shape.decode_only
        self.meter.observe_step(seconds, decoding, prompts, collected.accepted_drafts, row_tokens, quiet)
        self._mixed_steps.observe(seconds, step.chunk_tokens, shape.decodes, row_tokens)
        if drafts is not None:
            self._depth.observe(drafts)

    def took(self, seconds: Sequence[float], decoding: int) -> None:
        """Consecutive steps in which this many requests decoded a token each, and nothing else happened."""
        self.meter.observe_decode_steps(seconds, decoding)
        self._mixed_steps.observe_decode_steps(seconds)
        self._shape = StepShape(decoding, decodes=True)

"""A rank: the product's engine, stepped in simulated time."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.messages import Cancel, FirstToken, Ready, StepResult, Submit, TransferNews
from engine.step.shape import StepShape
from mesh.domain.workers import RankStatus
from sim.agent import SimulatedAgent
from sim.device import LocalClock, SimulatedDevice
from sim.network import Link
from sim.quiet_steps import QuietSteps
from sim.timeline import Timeline

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

ToRank = Submit | Cancel | FirstToken


class SimulatedRank:
    """Does what `engine.rank.loop` does: it reads messages, takes a step, and gives the result when the step ends.

    It does nothing before `frozen_until`, nor once it is not `alive`. Quiet steps (see QuietSteps) are taken together
    when the last of them ends, or earlier if something arrives; `on_quiet` is called with the time at which the first
    ends. If the worker has several ranks, `on_wake` has them all take a turn, and each step is taken alone.

    Attributes:
        shortest_first: whether the shortest of the prompts that arrive during one step goes first; if not, the earliest
            does.
    """

    def __init__(
        self,
        timeline: Timeline,
        config: EngineConfig,
        device: SimulatedDevice,
        clock: LocalClock,
        agent: SimulatedAgent,
        on_news: Callable[[TransferNews], None],
        on_result: Callable[[StepResult], None],
        on_quiet: Callable[[float], None],
        on_wake: Callable[[], None] | None = None,
        number: int = 0,
    ) -> None:
        """number: its own among the ranks of its worker."""
        self.device = device
        self.agent = agent
        self.alive = True
        self.frozen_until = 0.0
        self.steps = 0
        self.ready = Ready(
            device.model,
            device.namespace,
            device.context_tokens,
            device.vocabulary_size,
            device.total_blocks,
            config.max_requests,
            device.block_bytes,
            0,
        )
        self._timeline = timeline
        self._clock = clock
        self._on_news = on_news
        self._on_result = on_result
        self._on_quiet = on_quiet
        self._on_wake = on_wake
        self.engine = Engine(config, device, clock, cast("TransferAgent", agent), rank=number)
        self._quiet_steps = QuietSteps(self.engine)
        self.shortest_first, self.every_token = True, False
        self._submitted = 0
        self._inbox: list[ToRank] = []
        self._busy = False
        # Whether something arrived that the turn under way does not see.
        self._again = False
        # Quiet steps that are not taken yet: when the first began, then when each ends.
        self._quiet: list[float] = []

    def submit(self, submit: Submit, booked: int | None) -> None:
        """booked: unused here; see `Lockstep.submit`."""
        self.send(submit)

    def send(self, message: ToRank) -> None:
        self._inbox.append(message)
        self.wake()

    def wake(self) -> None:
        self._again = True
        if self._on_wake is not None:
            self._on_wake()
            return
        self._interrupt()
        if not self._busy:
            self._busy = True
            # All that arrives at this very moment is one arrival batch, like what one read of a rank's socket returns.
            self._timeline.at(max(self._timeline.now, self.frozen_until), self._turn)

    def freeze(self, seconds: float) -> None:
        """Make no progress for so long, once the step under way is over."""
        self._interrupt()
        self.frozen_until = max(self.frozen_until, self._timeline.now + seconds)

    def slow(self, factor: float) -> None:
        """From the next step on, each takes this many times as long."""
        self._interrupt()
        self.device.slowness = factor

    def catch_up(self, ending_now: bool = True) -> float | None:
        """Take the quiet steps that have ended by now. Returns when the next one ends; None if there is none.

        ending_now: whether a step that ends at this very moment counts as ended.
        """
        quiet, now = self._quiet, self._timeline.now
        if len(quiet) < 2 or now < quiet[1]:
            return quiet[1] if len(quiet) > 1 else None
        ended = (bisect_right if ending_now else bisect_left)(quiet, now) - 1
        if ended > 0:
            seconds = [ends - began for began, ends in pairwise(quiet[: ended + 1])]
            self._quiet = quiet[ended:]
            self.steps += ended
            for each in seconds:
                self.device.busy_seconds += each
            self._clock.now = self._quiet[0]
            self._on_result(self._quiet_steps.take(seconds))
        return self._quiet[1] if len(self._quiet) > 1 else None

    @property
    def busy_seconds(self) -> float:
        """Seconds of the steps that have begun."""
        self.catch_up()
        under_way = self._quiet[1] - self._quiet[0] if len(self._quiet) > 1 else 0.0
        return self.device.busy_seconds + under_way

    def drain_busy_seconds(self) -> float:
        """`busy_seconds` since the last call."""
        found, self.device.busy_seconds = self.busy_seconds, 0.0
        return found

    @property
    def taken(self) -> Mapping[int, int]:
        """See QuietSteps."""
        return self._quiet_steps.taken

    @property
    def statuses(self) -> Sequence[RankStatus]:
        """Empty: a worker of a single rank reports no ranks apart."""
        return ()

    @property
    def links(self) -> Sequence[Link]:
        """The links that carry this rank's KV."""
        return [self.agent.link]

    @property
    def held_blocks(self) -> int:
        pool = self.engine.pool
        return pool.total_blocks - pool.free_blocks

    def die(self) -> None:
        self._quiet = []
        self.alive = False
        self.agent.die()

    def take_messages(self) -> None:
        """Begin a turn: hand the messages to the engine, and set the clock to now."""
        inbox, self._inbox, self._again = self._inbox, [], False
        for message in inbox:
            self._handle(message)
        self.engine.poll_transfers()
        self._clock.now = self._timeline.now

    def step(self) -> StepResult | None:
        return self._take(partial(self.engine.step, self._send_news))

    def step_as_agreed(self, shape: StepShape, seconds: float) -> StepResult | None:
        """Take a step of the shape that the worker's ranks agreed on. It takes all of them `seconds`."""
        self.device.together_seconds = seconds
        return self._take(partial(self._step_as, shape))

    def tell(self, result: StepResult | None) -> None:
        """Hand out the result and the news of a step that has ended."""
        if result is not None:
            self._on_result(result)
        self._send_news()

    @property
    def goes_on(self) -> bool:
        """Whether another turn follows at once."""
        return self._again or self.engine.has_work()

    @property
    def now(self) -> float:
        """The rank's time. Within a turn it is the time at which the turn's step ends."""
        return self._clock.now

    def _turn(self) -> None:
        if not self.alive:
            return
        self.take_messages()
        if self._begin_quiet():
            return
        result = self.step() if self.engine.has_work() else None
        self._timeline.at(max(self._clock.now, self.frozen_until), lambda: self._end_turn(result))

    def _step_as(self, shape: StepShape) -> StepResult | None:
        self._send_news()
        return self.engine.step_as(shape)

    def _take(self, step: Callable[[], StepResult | None]) -> StepResult | None:
        self.steps += 1
        self._quiet_steps.over()
        self._clock.in_step = True
        result = step()
        self._clock.in_step = False
        return result

    def _begin_quiet(self) -> bool:
        """If several quiet steps come next, leave them for `catch_up` to take. Returns whether it did."""
        steps = 0 if self.every_token else self._quiet_steps.ahead()
        if steps < 2 or self._again or self._timeline.now < self.frozen_until:
            return False
        self._quiet = self.device.decode_times(self._timeline.now, steps, *self._quiet_steps.context)
        self._timeline.at(self._quiet[-1], partial(self._end_quiet, self._quiet[-1]))
        self._on_quiet(self._quiet[1])
        return True

    def _interrupt(self) -> None:
        """Drop the quiet steps after the one under way, because the next step has to see what has just arrived."""
        after = bisect_right(self._quiet, self._timeline.now) + 1
        if after < len(self._quiet):
            del self._quiet[after:]
            self._timeline.at(self._quiet[-1], partial(self._end_quiet, self._quiet[-1]))

    def _end_quiet(self, ends: float) -> None:
        if not self.alive or not self._quiet or self._quiet[-1] != ends:
            return
        self.catch_up()
        self._quiet = []
        self._end_turn(None)

    def _end_turn(self, result: StepResult | None) -> None:
        if not self.alive:
            return
        self.tell(result)
        self._busy = False
        if self.goes_on:
            self.wake()

    def _send_news(self) -> None:
        for news in self.engine.transfers.drain_news():
            self._on_news(news)

    def _handle(self, message: ToRank) -> None:
        match message:
            case Submit():
                self._submitted += 1
                self.engine.submit(message, None if self.shortest_first else (self._submitted, 0))
            case Cancel():
                self.engine.cancel(message)
            case FirstToken():
                self.engine.first_token(message)

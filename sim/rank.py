"""A rank: the product's engine, stepped in simulated time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.messages import Cancel, FirstToken, StepResult, Submit, TransferNews
from sim.agent import SimulatedAgent
from sim.device import LocalClock, SimulatedDevice
from sim.timeline import Timeline

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

ToRank = Submit | Cancel | FirstToken


class SimulatedRank:
    """Does what `engine.rank.loop` does: messages in, a step, its result out when the device is done with it.

    Nothing happens in it before `frozen_until`, nor once it is not `alive`.
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
    ) -> None:
        self.device = device
        self.agent = agent
        self.alive = True
        self.frozen_until = 0.0
        self.steps = 0
        self._timeline = timeline
        self._clock = clock
        self._on_news = on_news
        self._on_result = on_result
        self.engine = Engine(config, device, clock, cast("TransferAgent", agent))
        self._inbox: list[ToRank] = []
        self._busy = False
        # Something came that the turn under way does not see.
        self._again = False

    def send(self, message: ToRank) -> None:
        self._inbox.append(message)
        self.wake()

    def wake(self) -> None:
        self._again = True
        if not self._busy:
            self._busy = True
            # What comes at this very moment is one arrival batch, as what one read of a rank's socket brings.
            self._timeline.at(max(self._timeline.now, self.frozen_until), self._turn)

    def die(self) -> None:
        self.alive = False
        self.agent.die()

    def _turn(self) -> None:
        if not self.alive:
            return
        inbox, self._inbox, self._again = self._inbox, [], False
        for message in inbox:
            self._handle(message)
        engine = self.engine
        engine.poll_transfers()
        result = None
        self._clock.now = self._timeline.now
        if engine.has_work():
            self.steps += 1
            self._clock.in_step = True
            result = engine.step(self._send_news)
            self._clock.in_step = False
        self._timeline.at(max(self._clock.now, self.frozen_until), lambda: self._end_turn(result))

    def _end_turn(self, result: StepResult | None) -> None:
        if not self.alive:
            return
        if result is not None:
            self._on_result(result)
        self._send_news()
        self._busy = False
        if self._again or self.engine.has_work():
            self.wake()

    def _send_news(self) -> None:
        for news in self.engine.transfers.drain_news():
            self._on_news(news)

    def _handle(self, message: ToRank) -> None:
        match message:
            case Submit():
                self.engine.submit(message)
            case Cancel():
                self.engine.cancel(message)
            case FirstToken():
                self.engine.first_token(message)

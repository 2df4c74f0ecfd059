"""A prefill engine and a decode engine in one process. A few lines stand in for the services between them."""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.batch import Batch
from engine.engine import Engine
from engine.oracle.backend import OracleBackend, OracleStep
from engine.protocol.messages import Cancel, LandingOpened, Output, StepResult, Submit
from engine.step.shape import StepShape
from mesh.domain.targets import StoreTarget
from tests.support.engines import Transcript, oracle_config
from tests.support.fake_agent import Fabric, FakeAgent
from tests.support.later_slots import copy_later
from tests.support.remote_prompts import first_output_of, first_token_of, prefill_of
from transfer.config import TransferConfig
from transfer.events import PushEnded


class LayerReportingOracle(OracleBackend):
    """Reports its layer before the step ends, as a model does on a CPU."""

    def launch(self, batch: Batch, shape: StepShape) -> OracleStep:
        launched = super().launch(batch, shape)
        if batch.on_layers is not None:
            batch.on_layers(1)
        return launched


def moving_engine(
    fabric: Fabric,
    backend_type: type[OracleBackend] = OracleBackend,
    *,
    layerwise_tokens: int = 1 << 30,
    **settings: Any,
) -> Engine:
    """An oracle engine whose transfers go through the fabric, as do its copies to host memory and back."""
    config = oracle_config(transfer=TransferConfig(layerwise_tokens=layerwise_tokens), **settings)
    backend = backend_type(config)
    if isinstance(config.host_blocks, int) and config.host_blocks:
        copy_later(backend, config.host_blocks, fabric.later, fabric.later)
    agent: Any = FakeAgent(backend.kv_memory(), backend.namespace, fabric, layerwise_tokens)
    return Engine(config, backend, lambda: 0.0, agent)


class Pair:
    """Two engines and the messages between them. `relay_one` delivers one; each direction keeps its order."""

    def __init__(self, fabric: Fabric, decode: Engine, prefill: Engine) -> None:
        self.fabric = fabric
        self.decode = decode
        self.prefill = prefill
        self.transcript = Transcript()
        # The prefill engine's reports about its requests.
        self.prefilled = Transcript()
        self.submits: dict[int, Submit] = {}
        # The store to fetch from that is passed on with a prompt, by key.
        self.fetches: dict[int, StoreTarget] = {}
        # Requests by the transfer id of their landing.
        self.landings: dict[bytes, int] = {}
        self.push_ends: list[PushEnded] = []
        # Requests whose KV will not land, as the prefill engine reported.
        self.lost_keys: set[int] = set()
        self._messages: deque[Callable[[], None]] = deque()

    def submit(self, submit: Submit) -> None:
        self.submits[submit.key] = submit
        self.decode.submit(submit)

    def cancel(self, key: int) -> None:
        self.decode.cancel(Cancel(key))

    def step(self, engine: Engine) -> None:
        """One pass of a rank's loop."""
        engine.poll_transfers()
        result = engine.step(self._meanwhile) if engine.has_work() else None
        if engine is self.decode:
            self.transcript.record_rest(result)
            self._relay_to_prefill(result)
        else:
            self.prefilled.record(result)
            self._relay_to_decode(result)

    def _meanwhile(self) -> None:
        """Called while a step is computed: let bytes move meanwhile."""
        if self.fabric.rng.random() < 0.5:
            self.fabric.run_one()

    def relay_one(self) -> bool:
        if not self._messages:
            return False
        self._messages.popleft()()
        return True

    def run(self, rng: random.Random) -> "Pair":
        """Do random things until nothing is left to happen."""
        idle = 0
        while idle < 4:
            actions: list[Callable[[], bool]] = [
                self.relay_one,
                self.fabric.run_one,
                lambda: self._turn(self.decode),
                lambda: self._turn(self.prefill),
            ]
            rng.shuffle(actions)
            busy = [action() for action in actions]
            idle = 0 if any(busy) else idle + 1
        return self

    def _turn(self, engine: Engine) -> bool:
        engine.poll_transfers()
        busy = engine.has_work()
        self.step(engine)
        return busy

    def _relay_to_prefill(self, result: StepResult | None) -> None:
        for output in result.outputs if result else []:
            if output.finish or output.refusal:
                cancel = Cancel(output.key)
                self._messages.append(partial(self.prefill.cancel, cancel))
        for news in self.decode.transfers.drain_news():
            assert isinstance(news, LandingOpened)
            self.landings[news.ticket.transfer_id] = news.key
            self._messages.append(partial(self._prefill, news))

    def _prefill(self, opened: LandingOpened) -> None:
        self.prefill.submit(prefill_of(self.submits[opened.key], opened, self.fetches.get(opened.key)))

    def _relay_to_decode(self, result: StepResult | None) -> None:
        for output in result.outputs if result else []:
            self._relay_output(output)
        for news in self.prefill.transfers.drain_news():
            assert isinstance(news, PushEnded)
            self.push_ends.append(news)
            if news.error is not None:
                self._lose(self.landings[news.transfer_id])

    def _relay_output(self, output: Output) -> None:
        if output.token_ids:
            self._messages.append(partial(self._take_first_token, output))
        elif output.refusal is not None:
            self._lose(output.key)

    def _take_first_token(self, output: Output) -> None:
        if output.key in self.transcript.ends:
            return
        first = first_output_of(output, self.submits[output.key])
        self.transcript.record_first(first)
        match first_token_of(first):
            case Cancel() as cancel:
                self.decode.cancel(cancel)
                self._messages.append(partial(self.prefill.cancel, cancel))
            case message:
                self.decode.first_token(message)

    def _lose(self, key: int) -> None:
        self.lost_keys.add(key)
        self._messages.append(lambda: self.decode.cancel(Cancel(key)))


def make_pair(
    rng: random.Random,
    backend_type: type[OracleBackend] = OracleBackend,
    *,
    decode: Any = None,
    prefill: Any = None,
    **settings: Any,
) -> Pair:
    """decode, prefill: settings of one of the engines alone."""
    fabric = Fabric(rng)
    settings = {"total_blocks": 64, "max_requests": 16, **settings}
    engines = (moving_engine(fabric, backend_type, **{**settings, **(own or {})}) for own in (decode, prefill))
    return Pair(fabric, *engines)


def assert_nothing_moves(pair: Pair) -> None:
    """Assert that nothing is open and that every block is free."""
    for engine in (pair.decode, pair.prefill):
        assert not engine.has_work()
        assert engine.transfers.open == engine.transfers.awaited == 0
        assert not any(engine.pool.references)
        assert engine.pool.free_blocks == engine.pool.total_blocks
    for agent in pair.fabric.agents:
        assert not (agent.landings or agent.pushes or agent.fetches)

"""A prefill rank and a decode rank: real processes over UCX. A few lines stand in for the services between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.protocol.messages import Cancel, LandingOpened, Output, StepResult, Submit
from mesh.config import ObserveConfig
from mesh.domain.workers import TransferCounters
from tests.support.engines import Transcript
from tests.support.forking import forked_services
from tests.support.remote_prompts import first_output_of, first_token_of, prefill_of
from transfer.events import PushEnded
from worker.ranks.client import RankClient


@dataclass
class RankPair:
    decode: RankClient
    prefill: RankClient
    transcript: Transcript = field(default_factory=Transcript)
    prefilled: Transcript = field(default_factory=Transcript)
    pushes: list[PushEnded] = field(default_factory=list)
    # The latest counters of the decode rank, and of the prefill rank.
    received: TransferCounters = field(default_factory=TransferCounters)
    sent: TransferCounters = field(default_factory=TransferCounters)
    _submits: dict[int, Submit] = field(default_factory=dict)

    def submit(self, submit: Submit) -> None:
        self._submits[submit.key] = submit
        self.decode.submit(submit)

    async def follow_decode(self) -> None:
        async for message in self.decode.results:
            match message:
                case StepResult():
                    self.transcript.record_rest(message)
                    self.received = message.transfers or self.received
                    for output in message.outputs:
                        self._stop_prefill(output)
                case LandingOpened():
                    self._prefill(message)

    async def follow_prefill(self) -> None:
        async for message in self.prefill.results:
            match message:
                case StepResult():
                    self.prefilled.record(message)
                    self.sent = message.transfers or self.sent
                    for output in message.outputs:
                        self._pass_on(output)
                case PushEnded():
                    self.pushes.append(message)

    def _prefill(self, opened: LandingOpened) -> None:
        self.prefill.submit(prefill_of(self._submits[opened.key], opened))

    def _pass_on(self, output: Output) -> None:
        if output.token_ids:
            first = first_output_of(output, self._submits[output.key], self.decode.ready.eos_token_ids)
            self.transcript.record_first(first)
            self._tell_decode(first)
        elif output.refusal is not None:
            self.decode.cancel(output.key)

    def _tell_decode(self, first: Output) -> None:
        match first_token_of(first):
            case Cancel(key):
                self.decode.cancel(key)
                self.prefill.cancel(key)
            case message:
                self.decode.first_token(message)

    def _stop_prefill(self, output: Output) -> None:
        if output.finish or output.refusal:
            self.prefill.cancel(output.key)


@asynccontextmanager
async def rank_pair(
    decode: EngineConfig, prefill: EngineConfig, observe: ObserveConfig | None = None
) -> AsyncIterator[RankPair]:
    """Start the two ranks. observe: that of the prefill rank."""
    with forked_services():
        clients = [await RankClient.start(decode), await RankClient.start(prefill, observe)]
    pair = RankPair(clients[0], clients[1])
    followers = [asyncio.create_task(pair.follow_decode()), asyncio.create_task(pair.follow_prefill())]
    try:
        yield pair
    finally:
        for client in clients:
            await client.close(grace_seconds=30.0)
        await asyncio.gather(*followers)

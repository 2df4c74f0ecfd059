"""A rank in this process that decodes without end and moves KV meanwhile."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.rank.load import RankLoad, fill_pool
from bench.rank.model import make_rank, write_shape
from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.messages import FirstToken, LandingOpened, PushOffer, StepResult, Submit, TransferNews
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from mesh.blocks import BLOCK_TOKENS, chain_hashes
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.events import Landed, PushEnded
from transfer.ticket import Ticket
from transfer.tuning import tune_for_gpu_transfers

SHAPE = "r1-ep8-rank"
# Room for more rows than the running requests have: a request whose KV has landed takes a step or two.
SPARE_ROWS = 4
# Transfers in flight when they follow one another without a rate.
AT_ONCE = 2
TOKENS = 2500
WARM_STEPS = 20


@dataclass
class Round:
    # Seconds between tokens.
    step_seconds: list[float] = field(default_factory=list)
    # Seconds that each ended transfer took, counted from its ticket.
    transfer_seconds: list[float] = field(default_factory=list)


class PushedRank:
    def __init__(
        self, scratch: Path, layers: int, requests: int, prompt_tokens: int, context: int, transfer: TransferConfig
    ) -> None:
        self._requests, self._prompt_tokens, self._context = requests, prompt_tokens, context
        longest = context + TOKENS
        blocks = requests * -(-longest // BLOCK_TOKENS) + (2 * AT_ONCE + 2) * prompt_tokens // BLOCK_TOKENS
        config = EngineConfig(
            model_dir=write_shape(scratch, SHAPE, layers),
            random_weights=True,
            max_requests=requests + SPARE_ROWS,
            graph_rows=(requests + SPARE_ROWS,),
            total_blocks=blocks,
            # The bench runs each kind of step once before it measures.
            warm_up="off",
            context_tokens=max(longest, prompt_tokens + BLOCK_TOKENS),
            transfer=transfer,
        )
        resolved = resolve(config, Hardware(1, 0))
        self._backend = ModelBackend(resolved, make_rank(resolved))
        self.namespace: KvNamespace = self._backend.namespace
        tune_for_gpu_transfers()
        agent = TransferAgent(self._backend.kv_memory(), self.namespace, transfer, time.monotonic, lambda: None)
        self._engine = Engine(config, self._backend, time.monotonic, agent)
        self._load = RankLoad(self._engine, self._backend)
        self._random = random.Random(1)
        self._key = 1 << 40
        self._began: dict[bytes, float] = {}
        self._round = Round()
        # Transfers that were requested and have not ended.
        self._under_way = 0

    def meet(self, peer: Connection) -> None:
        self._peer = peer
        prompt = self._prompt()
        self._offered = chain_hashes(prompt)
        self._load.pretend_cached(prompt)
        # Held blocks are never evicted.
        self._engine.pool.acquire(self._engine.pool.match_prefix(self._offered))

    def start_decoding(self) -> None:
        fill_pool(self._backend.state)
        self._load.start_decoding(self._requests, self._context, TOKENS)
        self._load.decode_seconds(WARM_STEPS)

    def land(self) -> None:
        """Submit a request whose prompt the peer computes."""
        self._key += 1
        submit = Submit(
            key=self._key,
            request=TokenRequest(str(self._key), self._prompt(), Sampling(), StopConditions(2, ignore_eos=True)),
            remote_prefill=True,
        )
        self._engine.submit(submit)

    def offer(self) -> None:
        """Ask the peer for a landing for the blocks that are cached here."""
        self._peer.send(len(self._offered))

    def run(self, seconds: float, begin: Callable[[], None] | None = None, rate: float = 0.0) -> Round:
        """Step for `seconds`. begin: starts a transfer, `rate` times a second; with a rate of 0, AT_ONCE are always
        under way.
        """
        assert self._engine.load().running_requests >= self._requests, "they must not end before the measurement"
        self._round = Round()
        started = time.perf_counter()
        due, times = started, [started]
        while times[-1] < started + seconds:
            while begin is not None and (
                self._under_way < AT_ONCE if rate == 0 else due <= times[-1] and self._under_way < SPARE_ROWS
            ):
                self._under_way += 1
                begin()
                due += 1 / rate if rate else 0
            if self._decoded(self._step()):
                times.append(time.perf_counter())
        self._round.step_seconds = [later - earlier for earlier, later in pairwise(times)]
        while self._under_way:
            self._step()
        return self._round

    def _decoded(self, result: StepResult | None) -> bool:
        return result is not None and sum(bool(output.token_ids) for output in result.outputs) >= self._requests

    def _step(self) -> StepResult | None:
        """Do what a rank's loop does in one turn."""
        while self._peer.poll():
            self._hear(self._peer.recv())
        self._engine.poll_transfers()
        result = self._engine.step(self._tell_news)
        self._tell_news()
        return result

    def _tell_news(self) -> None:
        for news in self._engine.transfers.drain_news():
            self._tell(news)

    def _hear(self, message: Any) -> None:
        match message:
            case Ticket():
                self._began[message.transfer_id] = time.perf_counter()
                self._engine.transfers.handle(PushOffer(message, self._offered))
            case PushEnded(error=None) | Landed():
                self._end(message.transfer_id)
            case _:
                raise AssertionError(f"a transfer went wrong: {message}")

    def _tell(self, news: TransferNews) -> None:
        match news:
            case LandingOpened():
                self._began[news.ticket.transfer_id] = time.perf_counter()
                self._peer.send(news.ticket)
                self._engine.first_token(FirstToken(news.key, 5))
            case PushEnded():
                assert news.error is None, news

    def _end(self, transfer_id: bytes) -> None:
        self._under_way -= 1
        self._round.transfer_seconds.append(time.perf_counter() - self._began.pop(transfer_id))

    def _prompt(self) -> list[int]:
        return self._random.choices(range(1000), k=self._prompt_tokens)

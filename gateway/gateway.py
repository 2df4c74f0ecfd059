"""The gateway as a whole; its gRPC and HTTP APIs both use it."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from msgspec import structs

from gateway.account import Account, RecentAnswers
from gateway.asks import Ask
from gateway.catalog import Catalog, ModelText
from gateway.config import GatewayConfig
from gateway.dispatcher import Dispatcher
from gateway.intake import Intake
from gateway.links.decode_link import GatewayIdentity
from gateway.links.decode_links import DecodeLinks
from gateway.links.schedulers import Schedulers
from gateway.links.workers import WorkerDirectory
from gateway.live import LiveGeneration
from gateway.prepared import Prepared
from gateway.processes.ledger import Ledger
from gateway.quotas import Quotas
from gateway.responses.store import ResponseStore
from gateway.streams import Streams
from gateway.tenants import Tenant, Tenants
from mesh.addresses import split_addresses
from mesh.errors import DeadlineExceeded, StreamGone
from mesh.loop_turns import LoopTurns
from mesh.observe.spans import span
from mesh.observe.tracing import Sampler
from mesh.rpc.channel import Channels

READINESS_SECONDS = 1.0

_log = logging.getLogger("deepmesh.gateway")


class Gateway:
    """`async with Gateway(config, texts, channels) as gateway:` joins the mesh; the end of the block leaves it.

    Create it on the event loop that it runs on.
    """

    def __init__(
        self,
        config: GatewayConfig,
        texts: Mapping[str, ModelText],
        channels: Channels,
        ledger: Ledger | None = None,
    ) -> None:
        """ledger: shared by this gateway's processes, if there are several; by default the gateway has one to
        itself.
        """
        clock = asyncio.get_running_loop().time
        self.config = config
        ledger = ledger or Ledger([key.name for key in config.api_keys])
        self.tenants = Tenants(config.api_keys, ledger)
        self._quotas = Quotas(config.api_keys, ledger)
        self.answers = RecentAnswers()
        self.sampler = Sampler(config.observe.trace_share if config.observe.otlp_endpoint else 0.0)
        self.directory = WorkerDirectory(config.dispatch.worker_seconds)
        self.catalog = Catalog(texts, self.directory)
        self.intake = Intake(self.catalog, config.limits)
        self.loop_turns = LoopTurns()
        self.links = DecodeLinks(_identity(config), config.dispatch, channels, clock)
        self.streams = Streams(config.resume, self.catalog, self.directory, channels)
        self.responses = ResponseStore(config.responses) if config.responses.redis_url is not None else None
        self._changed = asyncio.Event()
        self._leaving = False
        self._schedulers = Schedulers(
            split_addresses(config.scheduler),
            channels,
            self.directory,
            config.dispatch,
            self.links.live_streams,
            self._on_change,
            clock,
        )
        self.dispatcher = Dispatcher(self._schedulers, self.links, config.dispatch, config.limits)
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._schedulers.run()), asyncio.create_task(self.dispatcher.sweep())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.links.close()
        if self.responses is not None:
            await self.responses.close()
        self.intake.close()

    @property
    def available(self) -> bool:
        """Whether some worker takes requests, according to a valid snapshot, and this gateway is not stopping."""
        return not self._leaving and self.directory.any_serving and self.directory.valid(self._clock())

    @property
    def scheduler(self) -> str:
        """The address of the scheduler that places requests at present."""
        return self._schedulers.followed

    @asynccontextmanager
    async def generate(
        self, ask: Ask, tenant: Tenant, api: str, timeout_seconds: float | None = None
    ) -> AsyncIterator[LiveGeneration]:
        """A live generation for the length of the block, which reads its deltas with `next`.

        Raises InvalidRequest, UnknownModel, NoWorker, Overloaded, DeadlineExceeded, SlowClient, WorkerLost and
        SchedulerUnavailable, on entry or from `next`.
        """
        deadline = self._deadline(timeout_seconds)
        ask_span = span("gateway.request", tenant=tenant.name, api=api)
        with ask_span, Account(tenant, api, self._clock, self.answers) as account, tenant.admitted():
            self._quotas.admit(tenant.name, self._clock())
            prepared = self.streams.named(await self._prepared(ask, tenant, deadline), tenant.name, ask.written)
            async with self.dispatcher.open(account.dispatch(prepared), deadline) as live, self._charged(live, tenant):
                yield account.accept(live)

    @asynccontextmanager
    async def resume(
        self,
        token: str,
        position: int,
        tenant: Tenant,
        api: str,
        ask: Ask | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[tuple[LiveGeneration, bytes]]:
        """Resume a stream after the `position` tokens that its client has, whichever gateway began it.

        Yields the generation, and how the API writes it. `ask` is the original request, for the case that no worker has
        the stream's log. Raises UnknownStream, StreamGone, and what `generate` raises.
        """
        deadline = self._deadline(timeout_seconds)
        claim = self.streams.claim(token, tenant.name)
        ask_span = span("gateway.request", tenant=tenant.name, api=api, resumed_at=position)
        with ask_span, Account(tenant, api, self._clock, self.answers) as account, tenant.admitted():
            self._quotas.admit(tenant.name, self._clock())
            taken = await self.streams.take(claim, position, token)
            if taken is None:
                if ask is None:
                    raise StreamGone("no worker has this stream's log any more: send its request too")
                ask = replace(ask, sampling=structs.replace(ask.sampling, seed=claim.seed))
                prepared = await self._prepared(ask, tenant, deadline)
                written = ask.written or b""
                taken = self.streams.begun_again(prepared, claim, position, token, written), written
            prepared, written = taken
            async with self.dispatcher.open(account.dispatch(prepared), deadline) as live, self._charged(live, tenant):
                yield account.accept(live), written

    @asynccontextmanager
    async def generate_sibling(
        self, leader: LiveGeneration, number: int, tenant: Tenant, api: str
    ) -> AsyncIterator[LiveGeneration]:
        """Another answer to the leader's prompt, on the same workers, which already have its KV. Raises as
        `generate`.
        """
        generation = leader.generation
        sibling = generation.prepared.sibling(number)
        ask_span = span("gateway.request", tenant=tenant.name, api=api, sibling=number)
        with ask_span, Account(tenant, api, self._clock, self.answers) as account, tenant.admitted():
            opened = self.dispatcher.open(account.dispatch(sibling), generation.deadline, leader.placement)
            async with opened as live, self._charged(live, tenant):
                yield account.accept(live)

    def _deadline(self, timeout_seconds: float | None) -> float:
        """On the event loop's clock. timeout_seconds: how long the client waits; None if it does not say."""
        longest = self.config.limits.generation_seconds
        return self._clock() + (longest if timeout_seconds is None else min(longest, timeout_seconds))

    async def _prepared(self, ask: Ask, tenant: Tenant, deadline: float) -> Prepared:
        """Prepare the request and charge its prompt to the quotas. Raises as `Intake.prepare`, and DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(deadline):
                prepared = await self.intake.prepare(ask, tenant.chain_root(ask.cache_salt), tenant.share(ask.priority))
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its prompt was encoded") from None
        self._quotas.charge(tenant.name, len(prepared.request.token_ids), self._clock())
        return prepared

    @asynccontextmanager
    async def _charged(self, live: LiveGeneration, tenant: Tenant) -> AsyncIterator[None]:
        """Charge the tokens of the answer to the quotas, however it ends."""
        try:
            yield
        finally:
            self._quotas.charge(tenant.name, live.generation.generated_tokens, self._clock())

    async def until(
        self, stop: Awaitable[None], ready: Callable[[], Awaitable[None]], unready: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait for `stop`; call `ready` and `unready` as workers join and leave. Raises a background task's error."""
        tasks = [asyncio.ensure_future(stop), asyncio.create_task(self._track_readiness(ready, unready))]
        try:
            done, _ = await asyncio.wait([*tasks, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def leave(self, unready: Callable[[], Awaitable[None]]) -> None:
        """Stop in order: report not ready, let balancers notice, let requests end, then end the rest."""
        self._leaving = True
        await unready()
        await asyncio.sleep(self.config.balancer_seconds)
        await self.dispatcher.drain(self.config.server.drain_seconds)

    async def _track_readiness(
        self, ready: Callable[[], Awaitable[None]], unready: Callable[[], Awaitable[None]]
    ) -> None:
        was_available = False
        while True:
            if self.available != was_available:
                was_available = not was_available
                await (ready if was_available else unready)()
                _log.info("workers joined" if was_available else "no worker left")
            try:
                # The timeout is needed because a snapshot can become too old without any change in the registry.
                # `wait_for` would not do: in Python 3.11 it loses a cancellation that arrives together with the change.
                async with asyncio.timeout(READINESS_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    def _on_change(self) -> None:
        self.links.retain(self.directory.incarnations())
        self._changed.set()


def _identity(config: GatewayConfig) -> GatewayIdentity:
    port = str(config.server.port) if config.server.port else secrets.token_hex(4)
    return GatewayIdentity(config.gateway_id or f"{socket.gethostname()}:{port}", secrets.token_hex(8))

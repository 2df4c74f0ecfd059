"""A worker of three hosts that forms without one of them."""

import asyncio
import logging
from pathlib import Path

import pytest
from deepmesh.internal.v1 import hosts_pb2_grpc

from engine.oracle.tokens import oracle_tokens
from engine.parallel.config import ParallelConfig
from mesh.domain.workers import WorkerRole
from mesh.errors import EngineFailed
from mesh.observe import metrics
from mesh.rpc.channel import Channels
from mesh.rpc.server import MeshServer
from tests.support.addresses import NOWHERE
from tests.support.engines import VOCABULARY, prompt_of
from tests.support.metric_values import value_of
from tests.support.running_group import submit_to
from tests.support.two_hosts import TwoHosts, first_host, join, worker_config
from tests.support.waiting import eventually
from worker.config import WorkerConfig
from worker.hosts import host_ranks, wire
from worker.hosts.comparison import own_version
from worker.hosts.fewer import on_hosts
from worker.hosts.first_host_link import FirstHostLink
from worker.hosts.host_ranks import HostRanks
from worker.hosts.joined import JoinedHosts
from worker.hosts.service import HostsServicer
from worker.ranks.group import RankGroup
from worker.ranks.host import RankHost


def three_hosts(seconds: float = 0.05, port: int = 0) -> WorkerConfig:
    return worker_config(port=port, parallel=ParallelConfig(dp=3, hosts=3, least_hosts=2, missing_host_seconds=seconds))


async def test_hosts_that_are_there_serve_without_the_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompts = [prompt_of(length, seed=length) for length in range(1, 200, 20)]
    async with first_host(three_hosts()) as (servicer, server):
        config = three_hosts()
        other = asyncio.create_task(join(config, server, number=2))
        assert await servicer.hosts.wait() == 2
        hosts = TwoHosts(await RankGroup.start(on_hosts(config, 2).engine, hosts=servicer.hosts), other)
        assert [each.name for each in hosts.group.processes] == ["rank 0 of 2 (host 0)", "rank 1 of 2 (host 2)"]
        # It comes late, and has to wait.
        late = asyncio.create_task(join(config, server, number=1))
        keys = [submit_to(hosts.group, prompt, 20) for prompt in prompts]
        await eventually(lambda: len(hosts.transcript.ends) == len(keys))
        assert {hosts.group.rank_of(key) for key in keys} == {0, 1}
        await eventually(lambda: "this worker serves without host 1: start its first host again" in caplog.text)
        assert value_of(metrics.WORKER_MISSING_HOSTS) == 1
        late.cancel()
        hosts.running.cancel()
        await hosts.group.close(grace_seconds=30.0)
        await other
        servicer.hosts.close()
        await asyncio.gather(late, hosts.running, return_exceptions=True)
    for key, prompt in zip(keys, prompts, strict=True):
        assert hosts.transcript.token_ids[key] == oracle_tokens(prompt, 20, VOCABULARY)


async def test_a_host_whose_ranks_do_not_start_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    # On a busy machine the other host's rank may still be at its imports, and it would end with its host.
    monkeypatch.setattr(host_ranks, "LEAVE_SECONDS", 60.0)
    config, prompt = three_hosts(seconds=60), prompt_of(100, seed=1)
    async with first_host(config) as (servicer, server):
        other = asyncio.create_task(join(config, server, number=2))
        host = await started_with_a_broken_host(config, servicer, server)
        assert "a host did not start: the worker begins again" in caplog.text
        hosts = TwoHosts(host.ranks, other)
        key = submit_to(hosts.group, prompt, 20)
        await eventually(lambda: len(hosts.transcript.ends) == 1)
        hosts.running.cancel()
        await host.close()
        await other
        servicer.hosts.close()
        await asyncio.gather(hosts.running, return_exceptions=True)
    assert [each.name for each in hosts.group.processes] == ["rank 0 of 2 (host 0)", "rank 1 of 2 (host 2)"]
    assert hosts.transcript.token_ids[key] == oracle_tokens(prompt, 20, VOCABULARY)


async def test_hosts_keep_their_ranks_if_another_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = worker_config(parallel=ParallelConfig(dp=3, hosts=3))
    kept, keep = asyncio.Event(), HostRanks.keep

    async def noted(ranks: HostRanks) -> None:
        await keep(ranks)
        kept.set()

    monkeypatch.setattr(HostRanks, "keep", noted)
    # As above.
    monkeypatch.setattr(host_ranks, "LEAVE_SECONDS", 60.0)
    async with first_host(config) as (servicer, server):
        other = asyncio.create_task(join(config, server, number=2))
        with pytest.raises(EngineFailed, match=r"rank 1 of 3 \(host 1\) ended with status 1 while it started"):
            await started_with_a_broken_host(config, servicer, server)
        await eventually(lambda: kept.is_set() or other.done())
        assert not other.done()
        servicer.hosts.close()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def started_with_a_broken_host(config: WorkerConfig, servicer: HostsServicer, server: MeshServer) -> RankHost:
    """The first host's ranks, after host 1 has joined and its rank has ended."""
    assert config.worker_id is not None
    joining = wire.join(config.worker_id, 1, config.engine.model_dump_json().encode(), own_version())
    async with Channels().open(server.endpoint) as channel:
        broken = FirstHostLink(hosts_pb2_grpc.HostsServiceStub(channel), joining)
        starting = asyncio.create_task(start(config, servicer.hosts))
        await broken.joined()
        await broken.ended(1, 1)
        try:
            return await starting
        finally:
            broken.close()


async def start(config: WorkerConfig, hosts: JoinedHosts) -> RankHost:
    return await RankHost.start(config, WorkerRole.DECODE, NOWHERE, Channels(), hosts=hosts)


async def test_too_few_hosts_wait_for_another() -> None:
    async with first_host(three_hosts()) as (servicer, server):
        waiting = asyncio.create_task(servicer.hosts.wait())
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        other = asyncio.create_task(join(three_hosts(), server, number=1))
        assert await waiting == 2
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def test_no_host_is_left_out_that_joins_in_time() -> None:
    async with first_host(three_hosts(seconds=60)) as (servicer, server):
        others = [asyncio.create_task(join(three_hosts(seconds=60), server, number)) for number in (2, 1)]
        assert await servicer.hosts.wait() == 3
        assert value_of(metrics.WORKER_MISSING_HOSTS) == 0
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def test_a_placement_of_all_hosts_is_not_for_fewer() -> None:
    config = worker_config(
        parallel=ParallelConfig(tp=2, dp=6, ep=12, hosts=3), balance={"redundant": 1, "placement_file": Path("experts")}
    )
    assert on_hosts(config, 3) is config
    engine = on_hosts(config, 2).engine
    parallel = engine.parallel
    assert (parallel.tp, parallel.dp, parallel.ep, parallel.hosts, parallel.world) == (2, 4, 8, 2, 8)
    assert (engine.balance.placement_file, engine.balance.redundant) == (None, 1)

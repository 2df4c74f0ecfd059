"""Ranks of one worker on two hosts: what one is told comes to the other, and one that is left keeps its ranks."""

import asyncio
from pathlib import Path

import pytest

from engine.drafts.config import DraftsConfig
from engine.oracle.tokens import oracle_tokens
from engine.parallel.config import ParallelConfig
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError, EngineFailed, InvalidRequest, PermissionDenied, WorkerDraining
from mesh.rpc.server import MeshServer
from tests.support.addresses import NOWHERE
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import VOCABULARY, prompt_of
from tests.support.oracle_model import assert_greedy, load_oracle
from tests.support.running_group import submit_to
from tests.support.two_hosts import TwoHosts, first_host, join, two_hosts, worker_config
from tests.support.waiting import eventually
from worker.hosts import first_host_link
from worker.hosts.comparison import own_version
from worker.hosts.first_host_link import FirstHostLink, serve_host
from worker.hosts.host_ranks import HostRanks
from worker.hosts.joined import JoinedHost, JoinedHosts
from worker.hosts.place import HostPlace
from worker.ranks.group import RankGroup


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.check("hosts"))])
async def test_ranks_of_both_hosts_serve_requests_with_exact_tokens(ranks: int, tmp_path: Path) -> None:
    prompts = [prompt_of(length, seed=length) for length in range(1, 200, 20)]
    async with two_hosts(worker_config(ranks, tmp_path)) as hosts:
        assert (hosts.group.ready.total_blocks, hosts.group.ready.max_requests) == (ranks * 200, ranks * 16)
        keys = [submit_to(hosts.group, prompt, 20) for prompt in prompts]
        await eventually(lambda: len(hosts.transcript.ends) == len(keys))
        assert {hosts.group.rank_of(key) for key in keys} == set(range(ranks))
        hosts.running.cancel()
        await hosts.group.close(grace_seconds=30.0)
        # It was stopped, and so nothing is wrong.
        await hosts.other
    for key, prompt in zip(keys, prompts, strict=True):
        assert hosts.transcript.token_ids[key] == oracle_tokens(prompt, 20, VOCABULARY)


@pytest.mark.check("hosts")
@pytest.mark.parametrize("tp", [1, 2])
async def test_ranks_of_both_hosts_generate_the_tokens_of_transformers(tp: int, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    prompts = [random_prompt(length, seed=length) for length in (150, 3, 70)]
    parallel = ParallelConfig(tp=tp, dp=2, hosts=2)
    config = worker_config(model_dir=checkpoint, parallel=parallel, max_step_tokens=96, drafts=DraftsConfig(next_n=1))
    async with two_hosts(config) as hosts:
        keys = [submit_to(hosts.group, prompt, 12) for prompt in prompts]
        await eventually(lambda: len(hosts.transcript.ends) == len(keys), 60)
    reference = load_oracle(checkpoint)
    for key, prompt in zip(keys, prompts, strict=True):
        assert_greedy(reference, prompt, hosts.transcript.token_ids[key])


async def test_a_killed_rank_of_the_second_host_is_named() -> None:
    async with two_hosts(worker_config()) as hosts:
        hosts.rank(1).kill()
        assert (await hosts.running).message == "rank 1 of 2 (host 1) ended with signal SIGKILL"
        with pytest.raises(EngineFailed, match="rank 1 ended with signal SIGKILL"):
            await hosts.other


async def test_ranks_of_the_first_host_outlive_the_second() -> None:
    async with two_hosts(worker_config()) as hosts:
        hosts.rank(1).kill()
        await hosts.running
        kept = hosts.group.kept
        assert kept is not None and [each.process_id for each in kept.ranks] == [hosts.rank(0).pid]
        assert kept.group is not None and hosts.rank(0).is_running()


@pytest.mark.check("hosts")
async def test_hosts_whose_records_are_lost_keep_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts(worker_config()) as hosts:
        submit_to(hosts.group, prompt_of(100, seed=1), 1000)
        await eventually(lambda: bool(hosts.transcript.token_ids))
        monkeypatch.setattr(JoinedHosts, "carry", lambda *_: None)
        assert "waits for another rank's" in (await hosts.running).message
        assert hosts.group.kept is not None
        assert hosts.rank(0).is_running() and hosts.rank(1).is_running()


@pytest.mark.check("hosts")
async def test_a_host_that_speaks_again_later_keeps_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, keep = asyncio.Event(), HostRanks.keep

    async def unheard(*_: object) -> None:
        await asyncio.Event().wait()

    async def noted(ranks: HostRanks) -> None:
        await keep(ranks)
        kept.set()

    monkeypatch.setattr(HostRanks, "keep", noted)
    async with two_hosts(worker_config()) as hosts:
        for message in ("progress", "data", "record"):
            monkeypatch.setattr(FirstHostLink, message, unheard)
        assert "rank 1 of 2 (host 1) has made no progress" in (await hosts.running).message
        # It reads what it was told meanwhile.
        await eventually(lambda: kept.is_set() or hosts.other.done())
        assert hosts.rank(0).is_running() and hosts.rank(1).is_running()


async def test_ranks_of_the_second_host_serve_a_new_first_host() -> None:
    prompt = prompt_of(100, seed=1)
    async with two_hosts(worker_config()) as hosts:
        keys = [submit_to(hosts.group, prompt, 1000) for _ in range(2)]
        await eventually(lambda: all(hosts.transcript.token_ids.get(key) for key in keys))
        left = hosts.rank(1)
        hosts.rank(0).kill()
        assert (await hosts.running).message == "rank 0 of 2 (host 0) ended with signal SIGKILL"
        assert hosts.group.kept is None
        await hosts.first.aclose()
        async with first_host(worker_config(port=hosts.port)) as (servicer, _):
            await servicer.hosts.wait()
            again = TwoHosts(await RankGroup.start(worker_config().engine, hosts=servicer.hosts), hosts.other)
            assert again.rank(1) == left
            keys = [submit_to(again.group, prompt, 20) for _ in range(2)]
            await eventually(lambda: len(again.transcript.ends) == 2)
            again.running.cancel()
            await again.group.close(grace_seconds=30.0)
            await hosts.other
            servicer.hosts.close()
    assert [again.transcript.token_ids[key] for key in keys] == [oracle_tokens(prompt, 20, VOCABULARY)] * 2


async def test_a_host_configured_otherwise_is_told_and_gives_up() -> None:
    async with first_host(worker_config()) as (_, server):
        with pytest.raises(ConfigError, match=r"host 1 is configured otherwise .*engine.max_step_tokens is 128 there"):
            await join(worker_config(max_step_tokens=128), server)


async def test_a_host_of_another_version_is_told_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_host_link, "own_version", lambda: "0.1.9")
    async with first_host(worker_config()) as (_, server):
        with pytest.raises(ConfigError, match=f"host 1 has another version .*: 0.1.9 there and {own_version()} here"):
            await join(worker_config(), server)


async def test_hosts_that_the_worker_does_not_have_are_refused() -> None:
    async with first_host(worker_config()) as (_, server):
        with pytest.raises(InvalidRequest, match="host 2 joins a worker of 2"):
            await join(worker_config(), server, number=2)
        other = worker_config().model_copy(update={"worker_id": "decode-2"})
        with pytest.raises(InvalidRequest, match="this is worker 'decode-1', and not 'decode-2'"):
            await join(other, server)


async def test_a_service_with_another_workers_certificate_does_not_join(tmp_path: Path) -> None:
    async with first_host(worker_config(directory=tmp_path)) as (_, server):
        for name in ("decode-2", "decode-1-2"):
            with pytest.raises(PermissionDenied, match=f"'{name}' claims that worker_id is 'decode-1'"):
                await join(worker_config(directory=tmp_path, name=name), server)


async def test_a_host_may_have_a_certificate_with_its_number(tmp_path: Path) -> None:
    async with first_host(worker_config(directory=tmp_path)) as (servicer, server):
        joining = asyncio.create_task(join(worker_config(directory=tmp_path, name="decode-1-1"), server))
        await servicer.hosts.wait()
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


async def test_a_host_joins_once() -> None:
    async with first_host(worker_config()) as (servicer, server):
        first = asyncio.create_task(join(worker_config(), server))
        await servicer.hosts.wait()
        with pytest.raises(WorkerDraining, match="host 1 of this worker has joined before"):
            servicer.hosts.admit(1, worker_config().engine.model_dump_json().encode(), own_version())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize(
    ("reached", "least"), [(False, None), (True, None), (True, 2)], ids=["not joined", "has a place", "waits for one"]
)
async def test_a_host_of_a_worker_that_forms_stops_at_once(
    reached: bool, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, taken, take = asyncio.Event(), asyncio.Event(), JoinedHosts.joined

    def noted(hosts: JoinedHosts, host: JoinedHost) -> None:
        take(hosts, host)
        taken.set()

    monkeypatch.setattr(MeshServer, "until_signal", lambda _: told.wait())
    monkeypatch.setattr(JoinedHosts, "joined", noted)
    config = worker_config(parallel=ParallelConfig(dp=3, hosts=3, least_hosts=least))
    patient = config.model_copy(update={"server": config.server.model_copy(update={"drain_seconds": 1000.0})})
    async with first_host(config) as (_, server):
        place = HostPlace(1, server.endpoint if reached else NOWHERE)
        serving = asyncio.create_task(serve_host(patient, WorkerRole.DECODE, place))
        if reached:
            await taken.wait()
        told.set()
        await asyncio.wait_for(serving, 30)

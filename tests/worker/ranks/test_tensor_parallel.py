"""Ranks of TP groups as a worker has them: the first of each takes requests, and the others follow it."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.oracle.tokens import oracle_tokens
from engine.parallel.config import ParallelConfig
from mesh.errors import ConfigError
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import VOCABULARY, oracle_config, prompt_of
from tests.support.forking import forked_services
from tests.support.oracle_model import assert_greedy, load_oracle
from tests.support.running_group import running_group, submit_to
from tests.support.waiting import eventually
from worker.ranks import group as rank_group
from worker.ranks.group import RankGroup


def ranks_of_this_process() -> set[psutil.Process]:
    return set(psutil.Process().children())


async def test_requests_go_to_the_first_rank_of_each_tp_group() -> None:
    config = oracle_config(parallel=ParallelConfig(tp=2, dp=2), total_blocks=100, max_requests=8)
    async with running_group(config) as (group, transcript):
        assert (len(group.processes), len(group.ranks)) == (4, 2)
        assert (group.ready.total_blocks, group.ready.max_requests) == (200, 16)
        prompts = {submit_to(group, prompt, 20): prompt for prompt in (prompt_of(100, seed) for seed in range(6))}
        await eventually(lambda: transcript.ends.keys() == prompts.keys())
    assert [await process.closed for process in group.processes] == [0] * 4
    for key, prompt in prompts.items():
        assert transcript.token_ids[key] == oracle_tokens(prompt, 20, VOCABULARY)


@pytest.mark.check("layouts")
async def test_a_model_over_two_processes_generates_the_tokens_of_transformers(tmp_path: Path) -> None:
    checkpoint, prompts = tiny_checkpoint(tmp_path), [random_prompt(length, seed=length) for length in (1, 70)]
    config = EngineConfig(model_dir=checkpoint, device="cpu", total_blocks=16, threads=1, parallel=ParallelConfig(tp=2))
    async with running_group(config) as (group, transcript):
        assert group.ready.speed is not None
        keys = [submit_to(group, prompt, 10) for prompt in prompts]
        await eventually(lambda: transcript.ends.keys() == set(keys))
    for key, prompt in zip(keys, prompts, strict=True):
        assert_greedy(load_oracle(checkpoint), prompt, transcript.token_ids[key])


@pytest.mark.check("layouts")
async def test_following_ranks_get_what_the_first_reads_from_host(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    prompts = [random_prompt(300, seed=seed) for seed in range(3)]
    parallel = ParallelConfig(tp=2)
    config = EngineConfig(
        model_dir=checkpoint, device="cpu", total_blocks=8, host_blocks=32, threads=1, parallel=parallel
    )
    async with running_group(config) as (group, transcript):
        for prompt in (*prompts, *prompts):
            key = submit_to(group, prompt, 10)
            await eventually(partial(transcript.ends.__contains__, key))
            assert_greedy(load_oracle(checkpoint), prompt, transcript.token_ids[key])
        tier = group.load.host_tier
        assert tier is not None and tier.read_blocks > 3


async def test_a_prompt_returns_to_the_rank_that_kept_it() -> None:
    config = oracle_config(parallel=ParallelConfig(dp=2), total_blocks=12, host_blocks=200)
    prompts, ranks = [prompt_of(650, seed) for seed in range(6)], list[int]()
    async with running_group(config) as (group, transcript):
        for number, prompt in enumerate((*prompts, *prompts)):
            if number in (1, 3, 4):
                # A request of another prompt, so that the ranks get some of them each.
                submit_to(group, prompt_of(20, 100 + number), 200)
            key = submit_to(group, prompt, 10)
            ranks.append(group.rank_of(key))
            await eventually(partial(transcript.ends.__contains__, key))
            assert transcript.token_ids[key] == oracle_tokens(prompt, 10, VOCABULARY)
            await eventually(lambda: group.load.running_requests == 0)
            if number >= len(prompts):
                assert transcript.cached_tokens[key] == 640
    assert set(ranks) == {0, 1}
    assert ranks[len(prompts) :] == ranks[: len(prompts)]


@pytest.mark.parametrize("step_ms", [0.0, 1000.0], ids=["at rest", "in a step"])
async def test_the_death_of_a_following_rank_ends_the_worker(step_ms: float) -> None:
    with forked_services():
        group = await RankGroup.start(oracle_config(parallel=ParallelConfig(tp=2), oracle={"step_ms": step_ms}))
    processes = [psutil.Process(process.process_id) for process in group.processes]
    ending = asyncio.create_task(group.run(lambda rank, message: None))
    if step_ms:
        submit_to(group, [1], 50)
        await eventually(lambda: bool(group.ranks[0].progress().step_loop_passes % 2))
    os.kill(group.processes[1].process_id, signal.SIGKILL)
    failure = await ending
    assert failure.message == "rank 1 of 2 ended with signal SIGKILL"
    await group.close(grace_seconds=0)
    assert not any(process.is_running() for process in processes)


async def test_a_frozen_following_rank_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "END_SECONDS", 2.0)
    with forked_services():
        group = await RankGroup.start(oracle_config(parallel=ParallelConfig(tp=2)))
    processes = [psutil.Process(process.process_id) for process in group.processes]
    ending = asyncio.create_task(group.run(lambda rank, message: None))
    os.kill(group.processes[1].process_id, signal.SIGSTOP)
    failure = await ending
    assert failure.message == "rank 1 of 2 has made no progress for 2 s: its process does not run"
    await group.close(grace_seconds=0)
    assert not any(process.is_running() for process in processes)


@pytest.mark.check("layouts")
async def test_a_tp_that_does_not_divide_heads_is_refused(tmp_path: Path) -> None:
    before = ranks_of_this_process()
    config = EngineConfig(model_dir=tiny_checkpoint(tmp_path), device="cpu", parallel=ParallelConfig(tp=3))
    with pytest.raises(ConfigError, match="tp=3 does not divide the model's 4 attention heads"):
        await RankGroup.start(config)
    await eventually(lambda: ranks_of_this_process() <= before)

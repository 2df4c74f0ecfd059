"""DP ranks as a worker has them: each with requests of its own, and together with the routed experts."""

import asyncio
import random
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.oracle.tokens import oracle_tokens
from engine.parallel.config import ParallelConfig
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import VOCABULARY, oracle_config, prompt_of
from tests.support.oracle_model import assert_greedy, load_oracle
from tests.support.running_group import running_group, submit_to
from tests.support.waiting import eventually
from worker.ranks.group import RankGroup

# Part of a second; a rank that spins takes what the machine gives it.
IDLE_SECONDS = 0.3


async def idle_shares(group: RankGroup) -> list[float]:
    """How much of a second each rank computes."""
    processes = [psutil.Process(rank.process_id) for rank in group.processes]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    await asyncio.sleep(1.0)
    return [sum(process.cpu_times()[:2]) - used for process, used in zip(processes, before, strict=True)]


async def test_ranks_that_divide_experts_generate_transformers_tokens(
    tmp_path: Path,
) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    # One rank has nothing at first, then much less than the other.
    prompts = [random_prompt(length, seed=length) for length in (150, 3, 70)]
    config = EngineConfig(
        model_dir=checkpoint,
        device="cpu",
        total_blocks=32,
        max_requests=8,
        max_step_tokens=96,
        parallel=ParallelConfig(dp=2),
        drafts=DraftsConfig(next_n=1),
    )
    async with running_group(config) as (group, transcript):
        keys = [submit_to(group, prompts[0], 12)]
        await eventually(lambda: bool(transcript.token_ids))
        keys += [submit_to(group, prompt, 6) for prompt in prompts[1:]]
        await eventually(lambda: len(transcript.ends) == len(keys))
        assert {group.rank_of(key) for key in keys} == {0, 1}
        assert max(await idle_shares(group)) < IDLE_SECONDS
    assert [await process.closed for process in group.processes] == [0, 0]
    reference = load_oracle(checkpoint)
    for key, prompt in zip(keys, prompts, strict=True):
        assert_greedy(reference, prompt, transcript.token_ids[key])


@pytest.mark.check("ranks")
async def test_thousands_of_requests_get_exact_tokens_from_four_ranks() -> None:
    choose = random.Random(0)
    lengths = [(choose.randint(1, 400), choose.randint(1, 40)) for _ in range(3000)]
    config = oracle_config(parallel=ParallelConfig(dp=4), total_blocks=200, max_requests=16)
    async with running_group(config) as (group, transcript):
        asked = {}
        for number, (prompt_tokens, tokens) in enumerate(lengths):
            prompt = prompt_of(prompt_tokens, seed=number % 500)
            asked[submit_to(group, prompt, tokens)] = prompt, tokens
            if number % 100 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: len(transcript.ends) == len(asked), seconds=300.0)
        cancelled_none = [key for key, end in transcript.ends.items() if end.refusal is not None]
    assert not cancelled_none
    for key, (prompt, tokens) in asked.items():
        assert transcript.token_ids[key] == oracle_tokens(prompt, tokens, VOCABULARY)

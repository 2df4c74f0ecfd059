"""Workers of two and four ranks, each on a GPU, their processes included, against one rank on the CPU, in float32."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.offload.config import OffloadConfig
from engine.parallel.config import ParallelConfig
from engine.protocol.messages import Submit
from mesh.domain.sampling import Sampling
from mesh.errors import ConfigError, EngineFailed
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import Transcript, submit_of
from tests.support.layouts import run_layout
from tests.support.running_group import running_group
from tests.support.waiting import eventually
from worker.ranks.group import RankGroup

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(180)]
# tp, dp and ep.
LAYOUTS = [(2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2)]
FOUR_GPU_LAYOUTS = [(4, 1, 4), (2, 2, 4), (2, 2, 2), (1, 4, 4)]
FOUR_GPUS = [pytest.param(layout, marks=pytest.mark.multi_gpu(4)) for layout in FOUR_GPU_LAYOUTS]
# On both sides of the block's 64 tokens and of chunks of 96.
LENGTHS = (1, 63, 65, 130, 200, 90, 40, 120)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]
# All requests grow into a second or third block, and a rank's pool cannot hold them together.
BLOCKS = 10
TOKENS = 40
SECONDS = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shares of heads, dense layers and experts are whole blocks of 128."""
    widths = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "intermediate_size": 256}
    return tiny_checkpoint(
        tmp_path_factory.mktemp("fp8"), dtype="float8", hidden_size=256, moe_intermediate_size=256, **widths
    )


def config_of(checkpoint: Path, tp: int = 1, dp: int = 1, ep: int | None = None, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "parallel": ParallelConfig(tp=tp, dp=dp, ep=ep),
        "device": "cuda",
        # Rounding decides nothing: steps of other shapes draw the same tokens.
        "dtype": "float32",
        "max_step_tokens": 96,
        "max_requests": 8,
        "total_blocks": BLOCKS,
        "threads": 1,
    }
    return EngineConfig(model_dir=checkpoint, **{**defaults, **settings})


def request_of(key: int, number: int, prompt: list[int], tokens: int = TOKENS) -> Submit:
    """A request; every other one is greedy."""
    sampling = Sampling(temperature=0.8 * (number % 2), top_p=0.9, seed=number)
    return submit_of(key, prompt, tokens, sampling=sampling, ignore_eos=True)


def expected_tokens(checkpoint: Path, prompts: list[list[int]], first: int = 0) -> list[list[int]]:
    """The tokens that one rank on the CPU generates. first: the number of the first request."""
    requests = [request_of(key, first + key, prompt) for key, prompt in enumerate(prompts)]
    found = run_layout(config_of(checkpoint, device="cpu", total_blocks=64), requests).token_ids
    return [found[key] for key in range(len(prompts))]


async def answers(
    group: RankGroup, transcript: Transcript, prompts: list[list[int]], first: int = 0
) -> list[list[int]]:
    """Submit all prompts at once; returns the tokens that the group's ranks generate."""
    keys = []
    for number, prompt in enumerate(prompts, first):
        keys.append(group.new_key(prompt, b"", computes_prompt=True))
        group.submit(request_of(keys[-1], number, prompt))
    await eventually(lambda: transcript.ends.keys() >= set(keys), SECONDS)
    return [transcript.token_ids[key] for key in keys]


@pytest.mark.parametrize("layout", [*LAYOUTS, *FOUR_GPUS], ids=lambda layout: "tp{} dp{} ep{}".format(*layout))
async def test_several_gpus_generate_the_tokens_of_one_rank(checkpoint: Path, layout: tuple[int, int, int]) -> None:
    expected = expected_tokens(checkpoint, PROMPTS)
    followed = [[*prompt, *tokens, 9] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    async with running_group(config_of(checkpoint, *layout)) as (group, transcript):
        # One rank has nothing to do: it runs dummies.
        assert await answers(group, transcript, PROMPTS[:1]) == expected[:1]
        assert await answers(group, transcript, PROMPTS) == expected
        # These prompts begin with cached blocks.
        again = await answers(group, transcript, followed[2:4], first=2)
        assert any(transcript.cached_tokens.values())
    assert [await process.closed for process in group.processes] == [0] * len(group.processes)
    assert again == expected_tokens(checkpoint, followed[2:4], first=2)


@pytest.mark.parametrize("fewest", [2, 20], ids="from {} tokens".format)
async def test_chunks_that_gpus_divide_change_no_token(checkpoint: Path, fewest: int) -> None:
    """Pieces have one token and more, come after cached blocks, and next to answers and to short ends of prompts."""
    divided = ParallelConfig(tp=1, dp=2, ep=2, context_parallel_tokens=fewest, context_parallel_reach=2048)
    prompts = [random_prompt(length, seed=length) for length in (201, 3, 130, 96, 300)]
    expected = expected_tokens(checkpoint, prompts)
    ends = [random_prompt(length, seed=length) for length in (150, 30, 5, 61, 2)]
    followed = [[*prompt, *tokens, *end] for prompt, tokens, end in zip(prompts, expected, ends, strict=True)]
    async with running_group(config_of(checkpoint, parallel=divided, total_blocks=64)) as (group, transcript):
        assert await answers(group, transcript, prompts) == expected
        again = await answers(group, transcript, followed)
        assert any(transcript.cached_tokens.values())
    assert again == expected_tokens(checkpoint, followed)


@pytest.mark.parametrize(
    "settings",
    [
        {"decode_graphs": "off"},
        {"drafts": DraftsConfig(next_n=2)},
        {"drafts": DraftsConfig(next_n=2), "offload": OffloadConfig(layers=2, slots=1)},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "layout", [(2, 1, 2), (1, 2, 2), *FOUR_GPUS[1:2]], ids=lambda layout: "tp{} dp{} ep{}".format(*layout)
)
async def test_drafts_offloaded_experts_and_eager_steps_change_no_token(
    checkpoint: Path, layout: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    async with running_group(config_of(checkpoint, *layout, **settings)) as (group, transcript):
        assert await answers(group, transcript, PROMPTS) == expected_tokens(checkpoint, PROMPTS)


@pytest.mark.parametrize(
    "layout", [(2, 1, 2), (1, 2, 2), *FOUR_GPUS[1:2]], ids=lambda layout: "tp{} dp{} ep{}".format(*layout)
)
async def test_blocks_from_host_memory_reach_all_gpus_of_a_group(
    checkpoint: Path, layout: tuple[int, int, int]
) -> None:
    prompts = [random_prompt(300, seed=seed) for seed in range(4)]
    expected = expected_tokens(checkpoint, prompts)
    async with running_group(config_of(checkpoint, *layout, host_blocks=64)) as (group, transcript):
        for _ in range(2):
            # One after the other: a pool holds two of them at most.
            found = [(await answers(group, transcript, [each], number))[0] for number, each in enumerate(prompts)]
            assert found == expected
        tier = group.load.host_tier
        assert tier is not None and tier.read_blocks > 0


@pytest.mark.parametrize(
    "layout", [(2, 1, 2), (1, 2, 2), *FOUR_GPUS[1::2]], ids=lambda layout: "tp{} dp{} ep{}".format(*layout)
)
async def test_quantized_weights_and_kv_are_served_by_several_gpus(
    fp8_checkpoint: Path, layout: tuple[int, int, int]
) -> None:
    config = config_of(fp8_checkpoint, *layout, dtype="auto", kv_dtype="float8_e4m3fn")
    async with running_group(config) as (group, transcript):
        one = await answers(group, transcript, PROMPTS[:1])
        assert all(len(tokens) == TOKENS for tokens in await answers(group, transcript, PROMPTS))
        # Rounding depends on the step's shape alone, which is the same.
        assert await answers(group, transcript, PROMPTS[:1]) == one


@pytest.mark.parametrize(
    "layout", [(2, 1, 2), (1, 2, 2), *FOUR_GPUS[1:2]], ids=lambda layout: "tp{} dp{} ep{}".format(*layout)
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
async def test_a_rank_that_dies_or_freezes_ends_the_worker(
    checkpoint: Path, layout: tuple[int, int, int], number: signal.Signals
) -> None:
    group, transcript = await RankGroup.start(config_of(checkpoint, *layout, total_blocks=200)), Transcript()

    def on_message(rank: int, message: Any) -> None:
        transcript.record(message)

    ending = asyncio.create_task(group.run(on_message))
    try:
        for index in range(4):
            key = group.new_key(PROMPTS[index], b"", computes_prompt=True)
            group.submit(request_of(key, index, PROMPTS[index], tokens=3000))
        await eventually(lambda: len(transcript.token_ids) == 4, SECONDS)
        os.kill(group.processes[1].process_id, number)
        failure = await asyncio.wait_for(ending, 6.0)
    finally:
        ending.cancel()
        await group.close(grace_seconds=0)
    assert isinstance(failure, EngineFailed)
    assert f"rank 1 of {layout[0] * layout[1]}" in failure.message
    assert all(process.closed.done() for process in group.processes)


async def test_fewer_gpus_than_ranks_end_the_start_with_one_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="2 ranks, each on a GPU of its own, and torch finds 1"):
        await RankGroup.start(config_of(checkpoint, dp=2))

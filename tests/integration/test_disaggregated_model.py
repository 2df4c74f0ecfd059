"""The keystone: a disaggregated mesh answers what transformers generates from the same weights, in fp32."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import DeepseekV3ForCausalLM

from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.greedy import MARGIN, assert_greedy
from tests.support.mesh_requests import fetched_blocks, forget, received_bytes, request_of, tokens_of, until_stored
from tests.support.process_mesh import SLOW_STORE, ProcessMesh, process_mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER_TOKENS = 24
# On both sides of blocks of 64, of the prefill worker's chunks of 96, and of segments of one or two blocks.
LENGTHS = (2, 63, 64, 65, 96, 97, 128, 129, 192, 257, 300)
SETTINGS = (
    *(f"{role}.engine.{setting}" for role in ("prefill", "decode") for setting in ("device=cpu", "dtype=float32")),
    "prefill.engine.max_step_tokens=96",
    "prefill.engine.total_blocks=96",
    "prefill.engine.threads=1",
    # Longer than all prompts but that of the test of sparse attention.
    "prefill.engine.sparse_prefill.from_tokens=384",
    "prefill.engine.sparse_prefill.recall=0.1",
    "decode.engine.total_blocks=128",
    "decode.engine.threads=1",
    *(f"{owner}.transfer.slot_bytes=65536" for owner in ("prefill.engine", "decode.engine", "kvstore")),
    "decode.can_prefill=false",
    "scheduler.store_link.poll_seconds=0.1",
    "scheduler.lease.seconds=2",
    *SLOW_STORE,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_nextn_predict_layers=2)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def layout(role: str, tp: int = 1, dp: int = 1) -> tuple[str, ...]:
    return f"{role}.engine.parallel.tp={tp}", f"{role}.engine.parallel.dp={dp}"


def pushed_in_layers(least_tokens: int) -> tuple[str, ...]:
    return tuple(f"{role}.engine.transfer.layerwise_tokens={least_tokens}" for role in ("decode", "prefill"))


def drafts(prefill: int, decode: int) -> tuple[str, ...]:
    workers = (f"{role}.engine.drafts.next_n={n}" for role, n in (("prefill", prefill), ("decode", decode)))
    # Set the store's draft layers, which would otherwise be those of whichever worker attaches first.
    return *workers, "prefill.engine.max_requests=16", f"kvstore.draft_layers={max(min(prefill, 2), min(decode, 2))}"


# Workers push layer by layer or whole and have one rank or several. Both sides have the same layout and drafts, or
# different ones.
MESHES = {
    "layerwise": pushed_in_layers(64),
    "whole, one rank to TP2": (*pushed_in_layers(8192), *layout("decode", tp=2)),
    "whole, DP2 to TP2": (*pushed_in_layers(8192), *layout("prefill", dp=2), *layout("decode", tp=2)),
    "layerwise, TP2 to one rank": (*pushed_in_layers(64), *layout("prefill", tp=2)),
    "layerwise, TP2 to DP2": (*pushed_in_layers(64), *layout("prefill", tp=2), *layout("decode", dp=2)),
    "whole, DP2 to DP2": (*pushed_in_layers(8192), *layout("prefill", dp=2), *layout("decode", dp=2)),
    "layerwise, TP2 to TP2xDP2": (*pushed_in_layers(64), *layout("prefill", tp=2), *layout("decode", tp=2, dp=2)),
    "layerwise, drafts of two modules": (*pushed_in_layers(64), *drafts(2, 3)),
    "layerwise, drafts to decode alone": (*pushed_in_layers(64), *drafts(0, 2), *layout("decode", tp=2)),
    "whole, drafts to prefill alone": (*pushed_in_layers(8192), *drafts(1, 0)),
    "whole, one module to two": (*pushed_in_layers(8192), *drafts(1, 2)),
}
# The others run with `make check-layouts`.
ALWAYS = ("layerwise",)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(each, marks=() if each in ALWAYS else pytest.mark.check("layouts")) for each in MESHES],
)
async def mesh(checkpoint: Path, request: pytest.FixtureRequest) -> AsyncIterator[ProcessMesh]:
    """1P1D and a store; every prompt is computed by the prefill worker."""
    settings = (*SETTINGS, *MESHES[request.param])
    async with process_mesh(checkpoint, prefill=1, stores=1, settings=settings) as running:
        yield running


async def check(mesh: ProcessMesh, reference: DeepseekV3ForCausalLM, prompts: list[list[int]]) -> None:
    answers = await asyncio.gather(*(tokens_of(mesh, prompt, ANSWER_TOKENS) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == ANSWER_TOKENS
        assert_greedy(reference, prompt, answer)


async def test_prompts_of_every_length(mesh: ProcessMesh, reference: DeepseekV3ForCausalLM) -> None:
    await check(mesh, reference, [random_prompt(length, seed=length) for length in LENGTHS])
    await mesh.drained()
    assert (await received_bytes(mesh))["decode-0"] > 0


async def test_an_exact_prompt_finds_nothing_of_what_was_computed_sparsely(
    mesh: ProcessMesh, reference: DeepseekV3ForCausalLM
) -> None:
    prompt = random_prompt(700, seed=3000)

    async def ask(sparse: bool) -> tuple[list[int], int]:
        """The answer, and how many of the prompt's tokens were found."""
        request = request_of(prompt, ANSWER_TOKENS)
        request.sparse_prefill = sparse
        messages = [message async for message in mesh.gateway.Generate(request, timeout=60)]
        token_ids = [token_id for message in messages for token_id in message.delta.token_ids]
        return token_ids, messages[-1].finished.usage.cached_tokens

    async def offered() -> bool:
        """Whether the gateway accepts it: it refuses until it knows the prefill worker."""
        try:
            await ask(sparse=True)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            return False
        return True

    await eventually(offered)
    answer, cached = await ask(sparse=False)
    assert_greedy(reference, prompt, answer)
    # At most the blocks before the threshold are found, on whichever worker.
    assert cached <= 384
    assert [(await ask(sparse))[1] for sparse in (True, False)] == [640, 640]
    # By default the worker's setting holds, which is sparse.
    assert await tokens_of(mesh, prompt, ANSWER_TOKENS) == (await ask(sparse=True))[0] != answer
    await mesh.drained()


async def test_a_prefix_that_the_workers_hold(mesh: ProcessMesh, reference: DeepseekV3ForCausalLM) -> None:
    prefix = random_prompt(200, seed=1000)
    await check(mesh, reference, [prefix])
    await check(mesh, reference, [prefix + random_prompt(length, seed=length) for length in (1, 60, 130)])
    await mesh.drained()


async def test_a_prompt_is_scored_where_it_is_computed(mesh: ProcessMesh, reference: DeepseekV3ForCausalLM) -> None:
    prompt = random_prompt(200, seed=1000)
    await check(mesh, reference, [prompt])
    request = request_of(prompt, 2)
    request.sampling.prompt_logprobs = 1
    call = mesh.gateway.Generate(request, timeout=60)
    found = [each async for message in call for each in message.delta.prompt_logprobs]
    with torch.inference_mode():
        every = torch.log_softmax(reference(torch.tensor([prompt])).logits[0, :-1], dim=1)
    own = every.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    assert [each.token_id for each in found] == prompt[1:]
    assert (torch.tensor([each.logprob for each in found]) - own).abs().max() < MARGIN
    best = torch.tensor([each.top[0].logprob for each in found])
    assert (best - every.amax(1)).abs().max() < MARGIN
    await mesh.drained()


async def test_a_prefix_may_be_in_the_store_or_in_both(mesh: ProcessMesh, reference: DeepseekV3ForCausalLM) -> None:
    prompt = random_prompt(321, seed=2000)
    await check(mesh, reference, [prompt])
    await until_stored(mesh, 5)
    await forget(mesh, "prefill-0", "decode-0")
    before = await fetched_blocks(mesh)
    await check(mesh, reference, [prompt[:130]])
    await check(mesh, reference, [prompt, prompt[:300]])
    await mesh.drained()
    assert await fetched_blocks(mesh) > before

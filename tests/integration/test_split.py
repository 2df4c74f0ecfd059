"""One flag makes a machine's GPUs one worker, or prefill and decode workers of different layouts. Runs on the CPU."""

import asyncio
from pathlib import Path

import pytest
import torch
from deepmesh.v1 import gateway_pb2_grpc
from transformers import DeepseekV3ForCausalLM

from cli.status import read_workers
from mesh.rpc.channel import Channels
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.greedy import assert_greedy
from tests.support.launched import up
from tests.support.mesh_requests import request_of

ANSWER_TOKENS = 16
ROLES = ("decode", "prefill")
# Even short prompts go to a prefill worker if there is one.
ALWAYS_HANDED_OVER = ("--set=scheduler.placement.handover_ms=0", "--set=decode.can_prefill=false")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


async def tokens_of(gateway: gateway_pb2_grpc.GatewayServiceStub, prompt: list[int]) -> list[int]:
    call = gateway.Generate(request_of(prompt, ANSWER_TOKENS), timeout=120)
    return [token async for message in call for token in message.delta.token_ids]


@pytest.mark.check("layouts")
@pytest.mark.parametrize(
    ("split", "layouts"),
    [
        ((), {"decode-0": "tp 1, dp 4, ep 4"}),
        (
            ("--split", "1P+1D", *ALWAYS_HANDED_OVER),
            {"decode-0": "tp 1, dp 2, ep 2", "prefill-0": "tp 2, dp 1, ep 2"},
        ),
        (
            ("--split", "2Px1+1D", "--set=decode.engine.parallel.tp=2", *ALWAYS_HANDED_OVER),
            {"decode-0": "tp 2, dp 1, ep 2", "prefill-0": "tp 1, dp 1, ep 1", "prefill-1": "tp 1, dp 1, ep 1"},
        ),
    ],
)
async def test_four_ranks_answer_as_transformers_however_they_are_split(
    split: tuple[str, ...], layouts: dict[str, str], checkpoint: Path
) -> None:
    reference = DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    small = [f"--set={role}.engine.total_blocks=64" for role in ROLES if f"{role}-0" in layouts]
    prompts = [random_prompt(length, seed=length) for length in (2, 64, 65, 130, 300)]
    async with up("--gpus", "4", *split, "--model", str(checkpoint), *small) as mesh:
        # On a busy machine loading torch alone takes long, in each of four ranks.
        await mesh.until_said("ready:", 300)
        async with Channels().open(mesh.gateway) as channel:
            gateway = gateway_pb2_grpc.GatewayServiceStub(channel)
            answers = await asyncio.gather(*(tokens_of(gateway, prompt) for prompt in prompts))
        workers = (await read_workers(mesh.scheduler, Channels())).workers
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == ANSWER_TOKENS
        assert_greedy(reference, prompt, answer)
    assert {each.identity.worker_id: each.identity.worker_class for each in workers} == {
        name: f"CPU, {layout}" for name, layout in layouts.items()
    }

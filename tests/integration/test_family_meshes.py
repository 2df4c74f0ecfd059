"""Models of the family through whole meshes: tokens are those of transformers' own classes, in fp32."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from mesh.text.tiktoken_file import read_ranks
from tests.support.checkpoints import edit_config, random_prompt, tiny_checkpoint
from tests.support.family import FAMILY
from tests.support.greedy import assert_greedy
from tests.support.mesh_requests import received_bytes, tokens_of
from tests.support.oracle_model import load_oracle_of_family, write_dequantized
from tests.support.packed import as_kimi_k25, packed_checkpoint
from tests.support.process_mesh import SLOW_STORE, ProcessMesh, process_mesh
from tests.support.tiktoken_models import write_tiktoken_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.check("family")]
ANSWER_TOKENS = 24
LENGTHS = (2, 64, 65, 130, 300)
ENGINES = tuple(
    f"{role}.engine.{setting}"
    for role in ("prefill", "decode")
    for setting in ("device=cpu", "dtype=float32", "threads=1", "total_blocks=96", "transfer.slot_bytes=65536")
)
# Its experts are packed in INT4, and it also sees.
KIMI_K25 = "kimi-k2.5"
# Published in FP8, with scales of activations that are powers of two.
DEEPSEEK_V31 = "deepseek-v3.1"
# One worker, and a prefill worker that pushes to two ranks and a store.
MESHES = {"ifb": 0, "pd": 1}
APART = ("decode.can_prefill=false", "decode.engine.parallel.tp=2", "kvstore.transfer.slot_bytes=65536", *SLOW_STORE)


@pytest.fixture(scope="module", params=(*FAMILY, KIMI_K25, DEEPSEEK_V31))
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint as it is published, and one of the same model that transformers reads."""
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param == KIMI_K25:
        source, twin = packed_checkpoint(folder, "compressed-tensors")
        as_kimi_k25(source)
        return source, twin
    if request.param == DEEPSEEK_V31:
        source = tiny_checkpoint(folder / "fp8", dtype="float8")
        section = json.loads((source / "config.json").read_text())["quantization_config"]
        edit_config(source, quantization_config=section | {"scale_fmt": "ue8m0"})
        return source, write_dequantized(source, folder / "twin")
    # Heads must divide among two ranks.
    heads = {"num_attention_heads": 4}
    checkpoint = tiny_checkpoint(folder, **{**FAMILY[request.param], **heads})
    return checkpoint, checkpoint


@pytest.fixture(scope="module")
def checkpoint(twins: tuple[Path, Path]) -> Path:
    return twins[0]


@pytest.fixture(scope="module")
def reference(twins: tuple[Path, Path]) -> PreTrainedModel:
    return load_oracle_of_family(twins[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MESHES)
async def mesh(
    checkpoint: Path, reference: PreTrainedModel, request: pytest.FixtureRequest
) -> AsyncIterator[ProcessMesh]:
    prefill = MESHES[request.param]
    module = reference.config.to_dict().get("num_nextn_predict_layers", 0)
    drafts = [f"{role}.engine.drafts.next_n={2 if module else 0}" for role in ("prefill", "decode")]
    settings = (*ENGINES, *drafts, *(APART if prefill else ()))
    async with process_mesh(checkpoint, prefill=prefill, stores=prefill, settings=settings) as running:
        yield running


async def test_prompts_of_every_length_are_answered_as_by_transformers(
    mesh: ProcessMesh, reference: PreTrainedModel
) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    answers = await asyncio.gather(*(tokens_of(mesh, prompt, ANSWER_TOKENS) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == ANSWER_TOKENS
        assert_greedy(reference, prompt, answer)
    if mesh.plan.prefill_workers:
        await mesh.drained()
        assert (await received_bytes(mesh))["decode-0"] > 0


async def test_a_model_with_a_tiktoken_vocabulary_answers_over_http(tmp_path: Path) -> None:
    write_tiktoken_model(tmp_path)
    vocabulary = len(read_ranks(tmp_path / "tiktoken.model"))
    settings = (tmp_path / "tokenizer_config.json").read_bytes()
    tiny_checkpoint(tmp_path, model_type="kimi_k2", vocab_size=vocabulary + 256, num_nextn_predict_layers=0)
    # As Moonshot publishes it.
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_bytes(settings)
    async with process_mesh(tmp_path, settings=ENGINES) as running, httpx.AsyncClient(timeout=60) as client:
        body = {"prompt": "Hello, world! 你好", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = (await client.post(f"{running.http_url}/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 8 and isinstance(answer["choices"][0]["text"], str)

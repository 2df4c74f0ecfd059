"""Other projects' clients and the load generator, against a mesh of real processes on a tiny checkpoint."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from loadgen.options import LoadOptions
from loadgen.run import load
from mesh.ports import free_port
from tests.support.checkpoints import tiny_checkpoint
from tests.support.process_mesh import ProcessMesh, process_mesh

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION = "Say something."
METRICS_PORT = "gateway.server.metrics_port"

STUB_CLIENT = """
import sys
import grpc
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc
stub = gateway_pb2_grpc.GatewayServiceStub(grpc.insecure_channel(sys.argv[1]))
prompt = gateway_pb2.Prompt(text="hello")
answer = list(stub.Generate(gateway_pb2.GenerateRequest(prompt=prompt, max_tokens=5, ignore_eos=True), timeout=30))
print(answer[-1].finished.usage.completion_tokens)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessMesh]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    settings = ("decode.engine.threads=1", f"{METRICS_PORT}={free_port()}")
    async with process_mesh(model, settings=settings) as running:
        yield running


async def run(*command: str | Path, **settings: Any) -> str:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, **settings
    )
    output, errors = await asyncio.wait_for(process.communicate(), 110)
    assert process.returncode == 0, errors.decode() + output.decode()
    return output.decode()


def openai_client(mesh: ProcessMesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="unused", max_retries=0)


async def test_the_openai_package_lists_the_model_and_chats(mesh: ProcessMesh) -> None:
    async with openai_client(mesh) as client:
        models = [model.id async for model in client.models.list()]
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
    assert models == ["tiny"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


async def test_a_streamed_chat_says_what_the_whole_one_says(mesh: ProcessMesh) -> None:
    async with openai_client(mesh) as client:
        fixed: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 24,
            "temperature": 0,
        }
        whole = await client.chat.completions.create(**fixed)
        stream = await client.chat.completions.create(**fixed, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_a_completion_continues_text_and_token_ids_alike(mesh: ProcessMesh) -> None:
    async with openai_client(mesh) as client:
        fixed: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0.7, "seed": 11}
        from_text = await client.completions.create(prompt="abc", logprobs=2, **fixed)
        counted = json.loads(await buf_curl(mesh, "CountTokens", {"prompt": {"text": "abc"}}))
        from_ids = await client.completions.create(prompt=counted["tokenIds"], **fixed)
    assert from_text.choices[0].text == from_ids.choices[0].text
    assert from_text.choices[0].logprobs is not None and from_text.usage is not None
    assert len(from_text.choices[0].logprobs.token_logprobs or []) == from_text.usage.completion_tokens


async def test_the_openai_package_raises_its_error_for_unknown_models(mesh: ProcessMesh) -> None:
    async with openai_client(mesh) as client:
        with pytest.raises(openai.NotFoundError, match="nonesuch"):
            await client.chat.completions.create(model="nonesuch", messages=[{"role": "user", "content": "hi"}])


async def buf_curl(mesh: ProcessMesh, method: str, body: dict[str, object]) -> str:
    buf = Path(sys.executable).parent / "buf"
    url = f"http://{mesh.grpc_endpoint}/deepmesh.v1.GatewayService/{method}"
    return await run(buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(body), url)


async def test_buf_curl_generates_through_reflection(mesh: ProcessMesh) -> None:
    prompt = {"chat": {"messages": [{"role": "user", "content": QUESTION}]}}
    output = await buf_curl(mesh, "Generate", {"prompt": prompt, "maxTokens": 6, "ignoreEos": True})
    *_, last = output.replace("}\n{", "}\x00{").split("\x00")
    assert json.loads(last)["finished"]["usage"]["completionTokens"] == 6


@pytest.mark.check("dist")
async def test_a_client_with_nothing_but_the_stubs_generates(mesh: ProcessMesh, tmp_path: Path) -> None:
    await run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    await run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, ROOT / "protos")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    output = await run(python, "-c", STUB_CLIENT, mesh.grpc_endpoint, cwd=tmp_path, env=environment)
    assert output.strip() == "5"


async def cached_tokens(mesh: ProcessMesh) -> float:
    """Prompt tokens found in a cache so far, by all requests."""
    port = dict(setting.split("=") for setting in mesh.plan.settings)[METRICS_PORT]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    name = "deepmesh_gateway_cached_tokens_total"
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + "{"))


async def test_the_answers_to_one_prompt_share_its_computation(mesh: ProcessMesh) -> None:
    before = await cached_tokens(mesh)
    async with openai_client(mesh) as client:
        answer = await client.completions.create(
            model="tiny", prompt=list(range(5, 205)), n=4, max_tokens=4, seed=1, extra_body={"ignore_eos": True}
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    # The prompt has three full blocks; the first answer computed them.
    assert await cached_tokens(mesh) - before == 3 * 192


@pytest.mark.parametrize("api", ["grpc", "url"])
async def test_later_turns_of_sessions_hit_the_cache(mesh: ProcessMesh, api: str) -> None:
    endpoint = {"grpc": mesh.grpc_endpoint, "url": f"{mesh.http_url}/v1"}[api]
    sizes = {"isl": 192, "osl": 40, "turns": 3, "turn_tokens": 40, "think_s": 0.02, "requests": 4, "warmup": 0}
    values = {api: endpoint, "dataset": "sessions", "rate": float("inf"), **sizes}
    report = await load(LoadOptions.model_validate(values))
    assert (report.summary.completed, report.summary.errors) == (12, {})
    first, later = report.summary.by_turn
    assert (first.requests, later.requests) == (4, 8)
    assert later.cached_tokens is not None and first.cached_tokens is not None
    # First turns can share no more than their system prompt, which is half of them.
    assert first.cached_tokens / first.input_tokens < 0.5
    assert later.cached_tokens / later.input_tokens > 0.65


async def test_a_model_calls_the_tool_that_it_must(mesh: ProcessMesh) -> None:
    async with openai_client(mesh) as client:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            tools=[{"type": "function", "function": {"name": "weather", "description": "of a city"}}],
            tool_choice="required",
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather"]

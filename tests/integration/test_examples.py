"""The clients of examples/, which are built first if their toolchains are installed; `make check-clients` tests
more.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from mesh.config import ServerConfig
from mesh.errors import InvalidRequest, MeshError, Overloaded
from mesh.rpc.server import MeshServer, Registration
from tests.support.process_mesh import oracle_settings, process_mesh
from tests.support.waiting import eventually

# The first test of a language waits for its client to be built.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent.parent
# Programs and files that building a language's client needs, as examples/Makefile finds them.
TOOLS = {
    "go": ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc", "/usr/share/gocode/src/google.golang.org/grpc"),
    "java": ("javac", "protoc", "grpc_java_plugin", "/usr/share/java/grpc-netty.jar"),
    "typescript": ("node", "npm"),
}
SECONDS = {"go": "{}s", "java": "{}", "typescript": "{}"}
# Without these npm tries for minutes if it reaches no registry.
NPM = {"npm_config_fetch_retries": "0", "npm_config_fetch_timeout": "20000"}
PACKAGES = "typescript/node_modules/.package-lock.json"
INSTALL_SECONDS = 60


# To build the others' clients takes 25 s of processor time.
ALWAYS = "go"


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each == ALWAYS else pytest.mark.check("clients")) for each in TOOLS],
)
def language(request: pytest.FixtureRequest) -> str:
    """A language whose client is built."""
    name: str = request.param
    if missing := [tool for tool in TOOLS[name] if shutil.which(tool) is None and not Path(tool).exists()]:
        pytest.skip(f"needs {', '.join(missing)}")
    if name == "typescript" and (installed := make(PACKAGES, INSTALL_SECONDS)).returncode != 0:
        pytest.skip(f"npm cannot install packages: {installed.stderr.strip()[:200]}")
    built = make(name)
    assert built.returncode == 0, built.stdout + built.stderr
    return name


def make(target: str, seconds: int = 0) -> "subprocess.CompletedProcess[str]":
    """Make a target of examples/, with all its processes ended after `seconds`; 0 is no limit."""
    command = ["timeout", str(seconds), "make", "-C", "examples", target]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **NPM}, capture_output=True, text=True)


@dataclass
class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers with `tokens` words, one every `pause_seconds`. It raises `refusals` first, one for each call."""

    tokens: int = 5
    pause_seconds: float = 0.0
    refusals: list[MeshError] = field(default_factory=list)
    calls: int = 0
    cancelled: bool = False
    # The metadata of the last call.
    metadata: dict[str, Any] = field(default_factory=dict)

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        self.metadata = dict(context.invocation_metadata())
        if self.refusals:
            raise self.refusals.pop(0)
        try:
            yield gateway_pb2.GenerateResponse(started=gateway_pb2.GenerateStarted(request_id="r"))
            for number in range(self.tokens):
                delta = gateway_pb2.GenerateDelta(text=f"w{number} ", token_count=1)
                yield gateway_pb2.GenerateResponse(delta=delta)
                await asyncio.sleep(self.pause_seconds)
            usage = common_pb2.Usage(completion_tokens=self.tokens)
            yield gateway_pb2.GenerateResponse(finished=gateway_pb2.GenerateFinished(usage=usage))
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled = True
            raise


@asynccontextmanager
async def serving(gateway: ScriptedGateway) -> AsyncIterator[str]:
    add = gateway_pb2_grpc.add_GatewayServiceServicer_to_server
    registration = Registration(add, gateway, "deepmesh.v1.GatewayService")
    async with MeshServer(ServerConfig(drain_seconds=0.2), "scripted gateway", [registration]) as server:
        yield f"127.0.0.1:{server.port}"


@dataclass(frozen=True)
class Ended:
    status: int
    answer: str
    said: str


async def run(language: str, endpoint: str, **options: object) -> Ended:
    """Run the language's client."""
    dashes = "-" if language == "go" else "--"
    arguments = [part for name, value in options.items() for part in (dashes + name.replace("_", "-"), str(value))]
    process = await asyncio.create_subprocess_exec(
        str(ROOT / "out" / "examples" / language / "client"),
        *(endpoint, "What is it?", *arguments),
        env={**os.environ, "DEEPMESH_API_KEY": "the-key"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        answer, said = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, answer.decode(), said.decode())


async def test_it_asks_again_after_a_refusals_delay(language: str) -> None:
    gateway = ScriptedGateway(refusals=[Overloaded("full", retry_after_ms=150) for _ in range(2)])
    async with serving(gateway) as endpoint:
        ended = await run(language, endpoint)
    assert (ended.status, ended.answer, gateway.calls) == (0, "w0 w1 w2 w3 w4 ", 3)
    assert ended.said.count("refused: again in 150") == 2 and "finished: 5 tokens" in ended.said
    assert gateway.metadata["authorization"] == "Bearer the-key"


async def test_it_cancels_and_the_gateway_hears_of_it(language: str) -> None:
    gateway = ScriptedGateway(tokens=100_000, pause_seconds=0.01)
    async with serving(gateway) as endpoint:
        ended = await run(language, endpoint, stop_after=3)
        await eventually(lambda: gateway.cancelled)
    assert ended.status == 0 and "cancelled: 3 tokens" in ended.said


async def test_it_keeps_a_deadline_in_the_midst_of_an_answer(language: str) -> None:
    gateway = ScriptedGateway(tokens=100_000, pause_seconds=0.05)
    async with serving(gateway) as endpoint:
        ended = await run(language, endpoint, deadline=SECONDS[language].format(2))
    assert ended.status == 1
    assert "deadline" in ended.said.lower()


@pytest.mark.check("clients")
async def test_it_gives_up_after_its_attempts(language: str) -> None:
    gateway = ScriptedGateway(refusals=[Overloaded("full", retry_after_ms=10) for _ in range(5)])
    async with serving(gateway) as endpoint:
        ended = await run(language, endpoint, attempts=2)
    assert (ended.status, gateway.calls) == (1, 2)
    assert "full" in ended.said


@pytest.mark.check("clients")
async def test_it_does_not_ask_again_where_that_cannot_help(language: str) -> None:
    gateway = ScriptedGateway(refusals=[InvalidRequest("no such thing", field="prompt")])
    async with serving(gateway) as endpoint:
        ended = await run(language, endpoint)
    assert (ended.status, gateway.calls) == (1, 1)
    assert "no such thing" in ended.said


@pytest.mark.check("clients")
async def test_a_real_mesh_answers_it(language: str) -> None:
    async with process_mesh(settings=oracle_settings()) as mesh:
        ended = await run(language, mesh.grpc_endpoint, tokens=12)
    assert ended.status == 0, ended.said
    assert "tokens" in ended.said and ended.answer

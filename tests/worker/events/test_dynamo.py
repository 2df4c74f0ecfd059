"""A foreign router: Dynamo's indexer reads workers' KV events, as the example publishes them, and finds prompts by it.
`make check-dynamo` runs this if Dynamo is there: pip install ai-dynamo-runtime pyzmq
"""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import httpx
import pytest

from launcher.plan import ServiceSpec
from mesh.ports import free_port
from tests.support.mesh_requests import forget, prompt_of, tokens_of
from tests.support.process_mesh import ProcessMesh, oracle_settings, process_mesh
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.check("dynamo"),
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("zmq") is None,
        reason="needs Dynamo: pip install ai-dynamo-runtime pyzmq",
    ),
]

EXAMPLE = Path(__file__).parents[3] / "examples/python/kv_events_over_zmq.py"
INDEXER = "import sys; from dynamo.indexer.main import main; main(sys.argv[1:])"
MODEL = {"model_name": "oracle"}
# Pools hold some of the prompts, host memory all of them.
SETTINGS = (
    *oracle_settings(**{"total_blocks": 60, "host_blocks": 4000, "parallel.dp": 2}),
    "decode.kv_events.enabled=true",
)


def with_ports(specs: Sequence[ServiceSpec]) -> Sequence[ServiceSpec]:
    """Workers that have the same ports after each start, as they have in Kubernetes."""
    return [replace(spec, port=spec.port or free_port()) for spec in specs]


class Indexer:
    """Dynamo's indexer, which knows workers by numbers."""

    def __init__(self, port: int) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")

    async def answers(self) -> bool:
        try:
            return (await self._http.get("/workers")).is_success
        except httpx.TransportError:
            return False

    async def register(self, number: int, published: str, replayed: str) -> None:
        worker = {"instance_id": number, "endpoint": published, "replay_endpoint": replayed, **MODEL, "block_size": 64}
        (await self._http.post("/register", json=worker)).raise_for_status()

    async def found(self, prompt: Sequence[int]) -> dict[int, int]:
        """How many of the prompt's tokens each worker holds in either tier; without those that hold none."""
        answer = (await self._http.post("/query", json={**MODEL, "token_ids": list(prompt)})).raise_for_status()
        instances = answer.json()["instances"]
        return {int(number): matched for number, each in instances.items() if (matched := each["longest_matched"])}


@asynccontextmanager
async def followed(mesh: ProcessMesh) -> AsyncIterator[Indexer]:
    """The indexer, which follows each worker from now on."""
    port = free_port()
    with ExitStack() as stack:

        def start(*command: object) -> None:
            process = subprocess.Popen([sys.executable, *map(str, command)])
            stack.callback(process.wait)
            stack.callback(process.kill)

        start("-c", INDEXER, "--port", port, "--threads", "1")
        indexer = Indexer(port)
        await eventually(indexer.answers)
        for number, worker in enumerate(await mesh.workers()):
            published, replayed = free_port(), free_port()
            addresses = "--publish", f"tcp://*:{published}", "--replay", f"tcp://*:{replayed}"
            start(EXAMPLE, worker.identity.endpoint, *addresses)
            await indexer.register(number, *(f"tcp://127.0.0.1:{port}" for port in (published, replayed)))
        yield indexer


async def test_dynamo_finds_each_prompt_on_the_worker_that_has_it() -> None:
    async with process_mesh(workers=2, settings=SETTINGS, deployed=with_ports) as mesh:
        seeds = count()

        async def run(prompts: int) -> list[list[int]]:
            made = [prompt_of(640, next(seeds)) for _ in range(prompts)]
            await asyncio.gather(*(tokens_of(mesh, each, 2) for each in made))
            return made

        known = await run(24)
        async with followed(mesh) as indexer:

            async def both_heard() -> bool:
                # What the indexer missed it learns of with a worker's next events.
                known.extend(await run(24))
                return {0, 1} <= {number for each in known for number in await indexer.found(each)}

            async def all_found() -> bool:
                return all([640 in (await indexer.found(each)).values() for each in known])

            await eventually(both_heard)
            await eventually(all_found)
            assert await indexer.found(prompt_of(640, 1000)) == {}
            await forget(mesh, "decode-0")

            async def forgotten() -> bool:
                return all([0 not in await indexer.found(each) for each in known])

            await eventually(forgotten)
            assert any([1 in await indexer.found(each) for each in known])

"""How long a worker of a small model is away after its rank was killed (`make check-restart`; the goal is below 5 s):
the pause of a stream that waits for it, the seconds of each phase of the start, and the processor time of the whole
start. If other work uses the processors too, the pause mostly measures that work."""

import asyncio
import re
import statistics
import sys
import time

import psutil
import pytest

from launcher.shipped_model import shipped_model
from tests.support.mesh_requests import request_of
from tests.support.process_mesh import ProcessMesh, process_mesh

KILLS = 3
STARTED = "started, in seconds by phase"
pytestmark = [pytest.mark.check("restart"), pytest.mark.slow]


async def tokens_with_longest_pause(mesh: ProcessMesh, streaming: asyncio.Event) -> tuple[list[int], float]:
    tokens: list[int] = []
    longest, last = 0.0, time.monotonic()
    async for message in mesh.gateway.Generate(request_of(range(300, 364), 200)):
        if message.delta.token_ids:
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            tokens += message.delta.token_ids
            if len(tokens) > 20:
                streaming.set()
    return tokens, longest


async def test_a_killed_rank_is_back_within_seconds() -> None:
    settings = ("decode.engine.device=cpu", "decode.engine.dtype=float32")
    async with process_mesh(shipped_model(), settings=settings) as mesh:
        undisturbed, _ = await tokens_with_longest_pause(mesh, asyncio.Event())
        pauses, phases, processor = [], [], []
        for _ in range(KILLS):
            streaming, known = asyncio.Event(), len(mesh.lines)
            answer = asyncio.create_task(tokens_with_longest_pause(mesh, streaming))
            await streaming.wait()
            service = psutil.Process(mesh.supervisor.process_ids["decode-0"])
            service.children()[0].kill()
            tokens, pause = await answer
            assert tokens == undisturbed
            pauses.append(pause)
            # The stream went on, which shows that its worker has started.
            (line,) = [line for line in mesh.lines[known:] if STARTED in line]
            phases.append({name: float(seconds) for name, seconds in re.findall(r"(\S+)=([\d.]+)", line)})
            service = psutil.Process(mesh.supervisor.process_ids["decode-0"])
            used = [process.cpu_times() for process in (service, *service.children())]
            processor.append(sum(each.user + each.system for each in used))
            await mesh.whole()
        sys.stdout.write(f"pauses of the stream: {', '.join(f'{pause:.2f}' for pause in sorted(pauses))} s\n")
        for phase in phases[0]:
            sys.stdout.write(f"  {phase}: {statistics.median(each[phase] for each in phases):.2f} s\n")
        sys.stdout.write(f"  processor time: {statistics.median(processor):.2f} s\n")

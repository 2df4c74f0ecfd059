"""Replaces every process of a mesh by another version's, one after the other, under load.

`make check-upgrade AGAINST=COMMIT`, by default the last release. The mesh begins with that commit's code and ends with
ours. In between, both versions talk to each other.
"""

import asyncio
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import grpc
import psutil
import pytest

from engine.oracle.tokens import oracle_tokens
from launcher.plan import HOST, ServiceSpec
from launcher.process import until_ready
from mesh.rpc.channel import Channels
from tests.support.mesh_requests import prompt_of
from tests.support.other_version import ROOT as OURS
from tests.support.other_version import extract_other_version
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.resuming_client import Answer, ResumingClient
from tests.support.waiting import eventually

AT_ONCE = 6
ANSWER_TOKENS = 200
pytestmark = [pytest.mark.check("upgrade"), pytest.mark.slow]


@dataclass(frozen=True)
class DeployedSpec(ServiceSpec):
    """A process that starts with the code that is in `roots[name]` at that time."""

    roots: dict[str, Path] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        root = self.roots[self.name]
        return {**super().environment, "PYTHONPATH": f"{root}:{root / 'protos'}"}


def deployed_spec(spec: ServiceSpec, roots: dict[str, Path]) -> DeployedSpec:
    # Leave out other_role, which not every version knows. `deepmesh up` sets it so that workers can change roles; here
    # none does.
    settings = tuple(each for each in spec.settings if not each.startswith("other_role="))
    given = {each.name: getattr(spec, each.name) for each in fields(ServiceSpec)}
    return DeployedSpec(**{**given, "settings": settings}, roots=roots)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The other version's files."""
    return extract_other_version(tmp_path)


async def ask_on(client: ResumingClient, numbers: Iterator[int], answers: list[Answer]) -> None:
    """Ask for one answer after the other, and compare each."""
    for number in numbers:
        prompt = prompt_of(random.Random(number).choice([20, 150, 400, 700]), number % 200)
        answer = await client.ask(prompt, ANSWER_TOKENS, number)
        assert answer.tokens == oracle_tokens(prompt, ANSWER_TOKENS, VOCABULARY)
        answers.append(answer)


async def replace(mesh: ProcessMesh, name: str, roots: dict[str, Path]) -> None:
    """Stop a process cleanly; the supervisor starts our version of it."""
    process = psutil.Process(mesh.supervisor.process_ids[name])
    roots[name] = OURS
    process.terminate()
    async with asyncio.timeout(90):
        await asyncio.to_thread(process.wait)
        await eventually(lambda: mesh.supervisor.process_ids.get(name) not in (None, process.pid))
        ports = dict(
            zip(("gateway", "gateway-1"), (grpc_port for _, grpc_port in mesh.plan.gateway_ports), strict=True)
        )
        if name in ports:
            await until_ready(f"{HOST}:{ports[name]}", Channels())
        await mesh.whole()


@pytest.mark.timeout(0)
async def test_a_mesh_is_upgraded_and_loses_nothing(theirs: Path) -> None:
    roots: dict[str, Path] = {}

    def deployed(specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        roots.update((spec.name, theirs) for spec in specs)
        return [deployed_spec(spec, roots) for spec in specs]

    settings = (*oracle_settings(**{"oracle.step_ms": 5}), "scheduler.lease.seconds=3")
    answers: list[Answer] = []
    async with (
        process_mesh(
            workers=2, prefill=2, stores=1, schedulers=2, gateways=2, settings=settings, deployed=deployed
        ) as mesh,
        grpc.aio.insecure_channel(f"{HOST}:{mesh.plan.gateway_ports[0][1]}") as first,
        grpc.aio.insecure_channel(f"{HOST}:{mesh.plan.gateway_ports[1][1]}") as second,
    ):
        client, numbers = ResumingClient([first, second]), itertools.count()
        asking = [asyncio.create_task(ask_on(client, numbers, answers)) for _ in range(AT_ONCE)]
        for name in list(mesh.supervisor.process_ids):
            before = len(answers)
            await replace(mesh, name, roots)
            assert not any(task.done() for task in asking), [task for task in asking if task.done()]
            while len(answers) < before + AT_ONCE:
                done, _ = await asyncio.wait(asking, timeout=0.1)
                assert not done
            sys.stdout.write(f"{name} replaced after {len(answers)} answers\n")
            sys.stdout.flush()
        for task in asking:
            task.cancel()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        running = [psutil.Process(number).environ() for number in mesh.supervisor.process_ids.values()]
        assert {environment["PYTHONPATH"].partition(":")[0] for environment in running} == {str(OURS)}
        await mesh.drained()
    sys.stdout.write(
        f"\n{len(answers)} answers, each token compared, while {len(roots)} processes were replaced; "
        f"{sum(answer.resumed > 0 for answer in answers)} went on at another gateway, the longest pause was "
        f"{max(answer.longest_pause for answer in answers):.1f} s\n"
    )

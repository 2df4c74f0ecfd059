"""Requests through a worker whose services run on several hosts, while parts of it die (`make check-hosts`)."""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.oracle.tokens import oracle_tokens
from launcher.plan import ServiceSpec
from mesh.background import background
from mesh.errors import ProcessFailed
from tests.support.checkpoints import tiny_checkpoint
from tests.support.hosts_mesh import WORKER, Host, HostSpec, Struck, incarnation_of, model_mesh, on_hosts, runs
from tests.support.mesh_requests import assert_right, prompt_of, received_bytes, tokens_of, until_stored
from tests.support.network import network, why_no_network
from tests.support.process_mesh import SLOW_STORE, VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.check("hosts")
SECOND, THIRD = f"{WORKER}-1", f"{WORKER}-2"
RANKS = "decode.engine.parallel.dp=4"
SETTINGS = (
    *oracle_settings(**{"oracle.step_ms": 5, "total_blocks": 512}),
    RANKS,
    "scheduler.lease.seconds=2",
    "decode.grace_seconds=2",
)
OF_MODEL = (RANKS, "decode.engine.device=cpu", "decode.engine.total_blocks=128", "scheduler.lease.seconds=2")
ANSWER_TOKENS = 300
AT_ONCE = 40


async def answer(mesh: ProcessMesh, seed: int) -> None:
    prompt = prompt_of(random.Random(seed).choice([20, 100, 300]), seed)
    assert await tokens_of(mesh, prompt, ANSWER_TOKENS) == oracle_tokens(prompt, ANSWER_TOKENS, VOCABULARY)


# The number of the host that is lost, and what happens to it.
STRIKES: dict[str, tuple[int, Callable[[Host], None]]] = {
    "a rank of the second host is killed": (1, lambda host: host.ranks[1].kill()),
    "a rank of the second host is stopped": (1, lambda host: host.ranks[0].suspend()),
    "the second host's service is killed": (1, lambda host: host.service.kill()),
    "the second host's service is stopped": (1, lambda host: host.service.suspend()),
    "the second host's service is told to stop": (1, lambda host: host.service.terminate()),
    "a rank of the first host is killed": (0, lambda host: host.ranks[1].kill()),
    "a rank of the first host is stopped": (0, lambda host: host.ranks[0].suspend()),
    "the first host's service is killed": (0, lambda host: host.service.kill()),
    "the first host's service is stopped": (0, lambda host: host.service.suspend()),
}


async def unregistered(mesh: ProcessMesh) -> bool:
    return await incarnation_of(mesh) is None


async def test_whatever_dies_requests_get_their_tokens_and_others_keep_weights() -> None:
    said = []
    async with process_mesh(workers=2, settings=SETTINGS, deployed=on_hosts) as mesh:
        for number, (name, (lost, strike)) in enumerate(STRIKES.items()):
            asked = [asyncio.create_task(answer(mesh, AT_ONCE * number + each)) for each in range(AT_ONCE)]
            await eventually(lambda: runs(mesh), 60)
            struck = await Struck.of(mesh)
            strike(struck.hosts[lost])
            await struck.noticed(mesh)
            await struck.hosts[lost].ends()
            seconds = await struck.serves_again(mesh)
            await asyncio.gather(*asked)
            struck.assert_kept(lost)
            await mesh.whole(120)
            said.append(f"{name}: the worker serves again after {seconds:.1f} s")
    sys.stdout.write("\n".join(["", *said, ""]))


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("first", [False, True], ids=["another host", "the first host"])
async def test_a_model_goes_on_with_the_weights_of_other_hosts(hosts: int, first: bool, tmp_path: Path) -> None:
    checkpoint, lost = tiny_checkpoint(tmp_path), 0 if first else hosts - 1
    async with model_mesh(checkpoint, partial(on_hosts, hosts=hosts), OF_MODEL) as mesh:
        struck = await Struck.of(mesh, hosts)
        seconds = await struck.outlive(mesh, lost, lambda host: host.service.kill())
    sys.stdout.write(f"\n{hosts} hosts, host {lost} killed: the worker serves again after {seconds:.1f} s\n")


async def test_a_model_goes_on_without_a_lost_host(tmp_path: Path) -> None:
    # In this time a host that waits is back, which asks every second.
    settings = (*OF_MODEL, "decode.engine.parallel.least_hosts=3", "decode.engine.parallel.missing_host_seconds=10")
    async with model_mesh(tiny_checkpoint(tmp_path), partial(on_hosts, hosts=4), settings) as mesh:
        struck = await Struck.of(mesh, 4)
        seconds = await struck.go_on_without_suspended(mesh, 1)
        [worker] = await mesh.workers()
        # The first host takes in the other when it starts again.
        whole = Struck(struck.hosts, worker.identity.incarnation, time.monotonic())
        await eventually(lambda: any("serves without host 1" in line for line in mesh.lines), 60)
        struck.hosts[0].service.kill()
        await whole.serves_again(mesh)
        [worker] = await mesh.workers()
        assert len(worker.ranks) == 4
    sys.stdout.write(f"\n4 hosts, host 1 stopped: the others serve again after {seconds:.1f} s\n")


async def test_a_model_goes_on_without_a_host_whose_ranks_end(tmp_path: Path) -> None:
    settings = (*OF_MODEL, "decode.engine.parallel.least_hosts=3", "decode.engine.parallel.missing_host_seconds=120")
    async with model_mesh(tiny_checkpoint(tmp_path), partial(on_hosts, hosts=4), settings) as mesh:
        struck = await Struck.of(mesh, 4)
        async with background(end_ranks(mesh, SECOND)):
            seconds = await struck.serves_again(mesh)
        [worker] = await mesh.workers()
        assert len(worker.ranks) == 3
    sys.stdout.write(f"\n4 hosts, ranks of host 1 never start: the others serve again after {seconds:.1f} s\n")


async def end_ranks(mesh: ProcessMesh, service: str) -> None:
    """Kill whatever ranks a service starts."""
    while True:
        # It may be starting again, or a rank may have ended.
        with suppress(KeyError, psutil.NoSuchProcess):
            for rank in psutil.Process(mesh.supervisor.process_ids[service]).children():
                rank.kill()
        await asyncio.sleep(0.05)


@pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")
async def test_a_model_goes_on_after_its_hosts_were_cut_apart(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    with network(("scheduler", "gateway", WORKER, SECOND)) as net:
        async with model_mesh(checkpoint, partial(on_hosts, net=net), OF_MODEL) as mesh:
            struck = await Struck.of(mesh)
            net.cut(WORKER, SECOND)
            net.cut(SECOND, WORKER)
            await eventually(lambda: unregistered(mesh), 60)
            net.heal()
            seconds = await struck.serves_again(mesh)
            struck.assert_kept()
    sys.stdout.write(f"\ncut apart: the worker serves again after {seconds:.1f} s\n")


@pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")
async def test_a_model_goes_on_without_a_host_that_another_misses(tmp_path: Path) -> None:
    three = ("dp=3", "least_hosts=2", "missing_host_seconds=10")
    settings = (*OF_MODEL, *(f"decode.engine.parallel.{each}" for each in three))
    with network(("scheduler", "gateway", WORKER, SECOND, THIRD)) as net:
        async with model_mesh(tiny_checkpoint(tmp_path), partial(on_hosts, hosts=3, net=net), settings) as mesh:
            struck = await Struck.of(mesh, 3)
            net.cut(SECOND, THIRD)
            net.cut(THIRD, SECOND)
            struck.hosts[1].service.kill()
            seconds = await struck.serves_again(mesh)
            [worker] = await mesh.workers()
            assert len(worker.ranks) == 2 and any("does not reach the one at" in line for line in mesh.lines)
    sys.stdout.write(f"\n3 hosts, two of them cut apart: the others serve again after {seconds:.1f} s\n")


@pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")
async def test_hosts_that_were_cut_apart_both_keep_their_weights() -> None:
    with network(("scheduler", "gateway", WORKER, SECOND, "decode-1")) as net:
        deployed = partial(on_hosts, net=net)
        async with process_mesh(workers=2, settings=SETTINGS, deployed=deployed) as mesh:
            asked = [asyncio.create_task(answer(mesh, each)) for each in range(AT_ONCE)]
            await eventually(lambda: runs(mesh), 60)
            struck = await Struck.of(mesh)
            net.cut(WORKER, SECOND)
            net.cut(SECOND, WORKER)
            await asyncio.gather(*asked)
            net.heal()
            seconds = await struck.serves_again(mesh)
            sys.stdout.write(f"\ncut apart: the worker serves again after {seconds:.1f} s\n")
            struck.assert_kept()
            await mesh.whole(120)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 1}, r"rank 1 of 2 \(host 1\) has loaded another model than .*: its weights_fingerprint is"),
        ({"hidden_size": 192}, "host 1 of the worker has another model than host 0: its hidden_size is 192, and not"),
    ],
    ids=["weights", "dimensions"],
)
async def test_a_host_with_another_checkpoint_ends_the_start(other: dict[str, Any], words: str, tmp_path: Path) -> None:
    of_hosts = [
        tiny_checkpoint(tmp_path / "0" / "model").parent,
        tiny_checkpoint(tmp_path / "1" / "model", **other).parent,
    ]

    def deployed(specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        return [
            replace(spec, prefix=("env", f"--chdir={of_hosts[spec.number]}")) if isinstance(spec, HostSpec) else spec
            for spec in on_hosts(specs)
        ]

    # The same path on each host, from where its service was started.
    settings = (*OF_MODEL, "decode.engine.parallel.dp=2", "decode.engine.model_dir=model")
    with pytest.raises(ProcessFailed, match=words):
        async with process_mesh(of_hosts[0] / "model", settings=settings, deployed=deployed):
            pass


async def test_kv_moves_between_ranks_of_every_host() -> None:
    settings = (*SETTINGS, *SLOW_STORE, "prefill.engine.parallel.dp=2", "decode.can_prefill=false")
    deployed = partial(on_hosts, workers=("prefill-0", WORKER))
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 64, 65, 200, 300, 640) * 5)]
    async with process_mesh(prefill=1, stores=1, settings=settings, deployed=deployed) as mesh:
        await assert_right(mesh, prompts)
        # Even if a rank's pool has lost blocks, the store has those that another host computed.
        await until_stored(mesh, 1)
        received = await received_bytes(mesh)
        assert received[WORKER] > 0
        await assert_right(mesh, prompts)
        statuses = {worker.identity.worker_id: worker for worker in await mesh.workers()}
        assert len(statuses[WORKER].ranks) == 4 and len(statuses["prefill-0"].ranks) == 2

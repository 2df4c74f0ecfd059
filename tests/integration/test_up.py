"""`deepmesh up` and `deepmesh demo` as a user runs them: real processes, on the oracle backend or a tiny checkpoint."""

import json
import os
import signal
from pathlib import Path

import httpx
import psutil
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from cli.answers import Answer, stream_grpc
from cli.status import read_workers
from mesh.addresses import with_port
from mesh.cost_file import CostFile, save_costs
from mesh.costs import CostModel
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tests.support.command import run_here
from tests.support.forking import forked_services
from tests.support.ipv6 import has_ipv6
from tests.support.launched import up
from tests.support.waiting import eventually
from tools.make_checkpoint import make_checkpoint

ORACLE = ("--set", "decode.engine.backend=oracle")


async def generate(endpoint: str, token_ids: list[int], max_tokens: int) -> Answer:
    answer = Answer()
    request = gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=token_ids)),
        sampling=common_pb2.SamplingParams(temperature=0),
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    async with Channels().open(endpoint) as channel:
        await stream_grpc(gateway_pb2_grpc.GatewayServiceStub(channel), request, answer, lambda text, reasoning: None)
    return answer


def none_lives(process_ids: dict[int, str]) -> bool:
    return not any(psutil.pid_exists(each) for each in process_ids)


async def test_a_mesh_answers_shows_workers_and_stops() -> None:
    async with up(*ORACLE, "--decode", "2") as mesh:
        await mesh.until_said("ready: OpenAI http://127.0.0.1:")
        answer = await generate(mesh.gateway, list(range(200)), 10)
        assert (answer.prompt_tokens, answer.completion_tokens) == (200, 10)
        snapshot = await read_workers(mesh.scheduler, Channels())
        assert {each.identity.worker_id for each in snapshot.workers} == {"decode-0", "decode-1"}
        everything = mesh.descendants()
        # Four services and a rank for each worker.
        assert len(everything) == 6
        mesh.process.send_signal(signal.SIGINT)
        assert await mesh.process.wait() == 0
        assert none_lives(everything)


async def test_a_mesh_on_every_address_serves_with_keys() -> None:
    host, metrics_port = "::" if has_ipv6() else "0.0.0.0", free_port()
    keys = ("--set", "gateway.api_keys=[{name: alice, key: secret-of-alice}]")
    async with up(*ORACLE, *keys, "--host", host, "--metrics-port", str(metrics_port)) as mesh:
        await mesh.until_said(f"ready: OpenAI http://{with_port(host, mesh.http_port)}/v1")
        assert mesh.said(f"gateway {metrics_port}") and mesh.said(f"decode-0 {metrics_port + 200}")
        async with httpx.AsyncClient() as client:
            for name in ("127.0.0.1", "[::1]")[: 2 if has_ipv6() else 1]:
                assert (await client.get(f"http://{name}:{mesh.http_port}/health")).status_code == 200
            for port in (metrics_port, metrics_port + 1, metrics_port + 200):
                assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200


async def test_a_mesh_stopped_while_it_starts_leaves_no_process() -> None:
    async with up(*ORACLE) as mesh:
        await mesh.until_said("scheduler ready")
        everything = mesh.descendants()
        mesh.process.send_signal(signal.SIGTERM)
        assert await mesh.process.wait() == 0
        assert none_lives(everything)


async def test_a_killed_worker_returns_and_a_killed_mesh_ends() -> None:
    async with up(*ORACLE) as mesh:
        await mesh.until_said("ready:")
        [before] = (await read_workers(mesh.scheduler, Channels())).workers
        os.kill(mesh.of_module("decode_svc"), signal.SIGKILL)
        await mesh.until_said("decode-0 ended with signal SIGKILL: starting it again in 0.5 s")
        await eventually(lambda: sum("worker joined" in line for line in mesh.lines) == 2)
        [after] = (await read_workers(mesh.scheduler, Channels())).workers
        assert after.identity.incarnation != before.identity.incarnation
        assert (await generate(mesh.gateway, [1, 2, 3], 5)).completion_tokens == 5
        everything = mesh.descendants()
        mesh.process.kill()
        await mesh.process.wait()
        await eventually(lambda: none_lives(everything))


async def test_a_service_that_cannot_start_ends_the_mesh() -> None:
    async with up(*ORACLE, "--set", "gateway.http.host=192.0.2.1") as mesh:
        assert await mesh.process.wait() == 1
        await mesh.reading
        assert mesh.lines[-1].startswith("deepmesh: ")
        assert "gateway cannot listen on 192.0.2.1" in mesh.lines[-1]


def test_the_demo_moves_kv_and_finds_its_prefix_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", "tiny")
    arguments = ("demo", "--model", str(tmp_path / "tiny"), "--log", str(tmp_path / "log"), "--max-tokens", "8")
    # However quickly this machine computes so small a model, hand over the first prompt, and fetch what a store has;
    # wait for the store even if the machine is busy.
    save_costs(CostFile(CostModel(fetch_latency_ms=0.0, fetch_bytes_per_second=1e15)), tmp_path / "costs.json")
    chosen = ("decode.can_prefill=false", f"scheduler.placement.costs={tmp_path}/costs.json")
    waits = [f"--set={setting}" for setting in (*chosen, "scheduler.store_link.match_ms=5000")]
    with forked_services():
        status, out, err = run_here((*arguments, *waits), environment={"COLUMNS": "120"})
    assert status == 0, out + err
    lines = out[out.index("and who computed it") :].splitlines()
    names = ("gRPC", "OpenAI HTTP", "second turn", "after a restart")
    # Columns: TTFT, TPOT, tokens in, cached and out, KV moved (transport, number and unit), blocks from a store.
    rows = {
        name: next(line for line in lines if line.strip().startswith(name)).split()[len(name.split()) :]
        for name in names
    }
    prompts, cached, generated = ([int(row[column]) for row in rows.values()] for column in (2, 3, 4))
    assert cached[0] == 0 and cached[1] >= 64 and cached[2] >= 64
    assert prompts[0] == prompts[1] < prompts[2] == prompts[3]
    assert generated == [8, 8, 8, 8]
    assert rows["gRPC"][-1] == "0" and rows["gRPC"][-2] in ("kB", "MB")
    assert int(rows["after a restart"][-1]) >= 2
    assert cached[3] >= 128


def test_a_demo_whose_worker_cannot_start_says_why(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", "tiny")
    # Files are whole, and hold another model's tensors.
    config = tmp_path / "tiny/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"q_lora_rank": 32}))
    arguments = ("demo", "--model", str(tmp_path / "tiny"), "--log", str(tmp_path / "log"))
    with forked_services():
        status, _, err = run_here((*arguments, "--prefill", "0", "--kvstore", "0"))
    assert status == 1
    assert "decode-0 ended with status 2" in err
    assert "config.json makes it" in err

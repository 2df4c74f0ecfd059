import asyncio
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from deepmesh.internal.v1 import kvstore_pb2, scheduler_pb2, scheduler_pb2_grpc, workers_pb2
from typer.testing import CliRunner

from cli.commands import build
from cli.config import Service
from cli.main import INTERRUPTED
from launcher.plan import MODULES
from mesh.config import ServerConfig
from mesh.errors import ConfigError
from mesh.rpc.server import MeshServer, Registration
from tests.support.addresses import NOWHERE
from tests.support.command import deepmesh
from tests.support.programs import ROOT, run_program
from tests.support.scripted_gateway import Delta, ScriptedGateway

DEEPMESH = "import sys; from cli.main import main; sys.argv[0] = 'deepmesh'; main()"


async def deepmesh_process(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", DEEPMESH, *arguments],
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def WatchWorkers(self, request: Any, context: Any) -> AsyncIterator[scheduler_pb2.WatchWorkersResponse]:
        identity = workers_pb2.WorkerIdentity(
            worker_id="decode-7", model="small", endpoint="127.0.0.1:9", total_blocks=1000, max_requests=16
        )
        load = workers_pb2.WorkerLoad(running_requests=3, free_blocks=990, decode_step_ms=12.34)
        worker = scheduler_pb2.WorkerStatus(
            identity=identity, load=load, state=workers_pb2.WORKER_STATE_DRAINING, cached_blocks=55
        )
        transfers = workers_pb2.TransferStatus(
            open_landings=4,
            total_slots=8,
            free_slots=6,
            quarantined_slots=1,
            received_bytes={"posix": 3_500_000, "tcp": 1000},
            refused={"wrong digest": 2},
        )
        worker.transfers.CopyFrom(transfers)
        tier = kvstore_pb2.TierStatus(name="memory", total_blocks=2000, used_blocks=77, block_bytes=100_000)
        store = scheduler_pb2.StoreStatus(endpoint="127.0.0.1:8", store_id="kvstore-3", tiers=[tier], lookups=9, hits=5)
        store.attached_workers = 3
        lost = scheduler_pb2.StoreStatus(endpoint="127.0.0.1:9")
        yield scheduler_pb2.WatchWorkersResponse(workers=[worker], stores=[store, lost])
        await asyncio.sleep(60)


def scheduler() -> MeshServer:
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    registration = Registration(add, ScriptedScheduler(), "deepmesh.internal.v1.SchedulerService", ("WatchWorkers",))
    return MeshServer(ServerConfig(), "scheduler", [registration])


async def test_no_command_loads_torch_before_it_runs() -> None:
    status, _, stderr = await run_program(
        "import sys; sys.modules['torch'] = None; import cli.commands; cli.commands.build()"
    )
    assert (status, stderr) == (0, "")


async def test_an_interrupt_while_a_command_is_imported_is_no_fault() -> None:
    interrupt = (
        "type('Interrupt', (), {'find_spec': lambda self, name, *_: (_ for _ in ()).throw(KeyboardInterrupt)})()"
    )
    status, out, stderr = await run_program(
        f"{DEEPMESH.removesuffix('main()')}sys.meta_path.insert(0, {interrupt}); main()"
    )
    assert (status, out, stderr) == (INTERRUPTED, "", "")


async def test_help_names_every_command_and_the_ports() -> None:
    status, out, _ = await deepmesh("--help")
    assert status == 0
    assert all(word in out for word in ("up", "chat", "status", "make-checkpoint", "bench", "demo", "8002"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown() -> str:
    """What `deepmesh status` prints."""
    async with scheduler() as server:
        status, out, _ = await deepmesh("status", "--scheduler", server.endpoint)
    assert status == 0
    return out


def test_status_shows_workers_their_load_and_cache(shown: str) -> None:
    assert all(text in shown for text in ("decode-7", "draining", "small", "3/16", "10/1,000", "55", "12.3"))


def test_status_shows_landings_slots_and_bytes_by_transport(shown: str) -> None:
    rows = [line.split() for line in shown.split("KV moved by")[1].splitlines()]
    assert ["decode-7", "4/0/0", "6/8", "1", "posix", "3.5", "MB", "0", "2"] in rows
    assert "tcp 1.0 kB" in shown


def test_status_shows_stores_tiers_and_silent_ones(shown: str) -> None:
    rows = [line.split() for line in shown.split("KV store")[1].splitlines()]
    assert ["kvstore-3", "memory", "77/2,000", "7.7", "MB", "3", "9", "5"] in rows
    assert ["127.0.0.1:9", "does", "not", "answer"] in rows


async def test_status_finds_the_scheduler_that_the_environment_names() -> None:
    async with scheduler() as server:
        status, out, _ = await deepmesh("status", "--json", DEEPMESH_SCHEDULER=server.endpoint)
    assert status == 0
    [worker] = json.loads(out)["workers"]
    assert (worker["identity"]["worker_id"], worker["load"]["running_requests"]) == ("decode-7", 3)
    assert worker["kv_unreadable"] == ""


async def test_status_says_so_where_it_is_told_the_gateway() -> None:
    async with ScriptedGateway([]).served() as server:
        status, out, err = await deepmesh("status", "--scheduler", server.endpoint)
    assert (status, out, err) == (1, "", f"deepmesh: what answers at {server.endpoint} is no scheduler\n")


async def test_status_without_a_scheduler_is_one_line() -> None:
    status, out, err = await deepmesh("status", "--scheduler", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err == "deepmesh: no scheduler answers at 127.0.0.1:1: is deepmesh up running? --scheduler names another\n"


async def test_health_tells_a_ready_service_from_one_that_loads() -> None:
    async with scheduler() as server:
        assert (await deepmesh("health", server.endpoint))[0] == 1
        assert (await deepmesh("health", server.endpoint, "--service", "liveness"))[0] == 0
        await server.ready()
        assert await deepmesh("health", server.endpoint) == (0, "", "")
        status, _, err = await deepmesh("health", server.endpoint, "--service", "weather")
        assert (status, err.splitlines()[-1].endswith("about its weather: NOT_FOUND")) == (1, True)


async def test_health_of_nobody_is_one_line() -> None:
    status, out, err = await deepmesh("health", "127.0.0.1:1")
    assert (status, out, err.count("\n")) == (1, "", 1)


async def test_piped_text_is_one_message() -> None:
    gateway = ScriptedGateway([Delta(text="Good "), Delta(text="day")])
    async with gateway.served() as server:
        status, out, _ = await deepmesh("chat", "--endpoint", server.endpoint, "--system", "S", stdin="two\nlines\n")
    assert (status, out) == (0, "Good day\n")
    assert [each.content for each in gateway.requests[0].prompt.chat.messages] == ["S", "two\nlines"]


def test_chat_refuses_more_tokens_than_a_request_can_say() -> None:
    ended = CliRunner().invoke(build(), ["chat", "--max-tokens", str(2**32)])
    assert (ended.exit_code, "Invalid value for '--max-tokens'" in ended.output) == (2, True)


async def test_an_empty_pipe_is_refused() -> None:
    async with ScriptedGateway([]).served() as server:
        status, _, err = await deepmesh("chat", "--endpoint", server.endpoint)
    assert (status, err.startswith("deepmesh: the message is empty")) == (2, True)


@pytest.mark.parametrize(("system", "stdin"), [("\udcff", b"two"), ("S", b"\xff")])
async def test_text_that_is_not_utf_8_is_refused(system: str, stdin: bytes) -> None:
    async with ScriptedGateway([Delta(text="no")]).served() as server:
        chat = ("chat", "--endpoint", server.endpoint, "--system", system)
        status, out, err = await deepmesh_process(*chat, stdin=stdin)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("deepmesh: text that is no UTF-8 cannot be sent: ")


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", DEEPMESH, "config", "decode"]
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (1, b"deepmesh: No space left on device\n")


def test_config_prints_the_keys_of_one_service() -> None:
    out = CliRunner().invoke(build(), ["config", "decode"]).output
    assert "engine.max_requests  integer >= 1 and <= 4095, default 64\n    Requests that run at once.\n" in out
    assert "lease.seconds" not in out


def test_config_of_no_service_names_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"no service decod \(did you mean decode\?\)"):
        build()(["config", "decod"], standalone_mode=False)


async def test_bench_says_where_no_gateway_answers() -> None:
    status, _, err = await deepmesh("bench", "--rate", "1", "--requests", "1", "--endpoint", "127.0.0.1:1")
    said = "deepmesh: no gateway answers at 127.0.0.1:1: is deepmesh up running? --endpoint names another\n"
    assert (status, err) == (1, said)


def test_help_asks_for_the_certificate_that_a_command_needs() -> None:
    for command, whose in (("status", "An operator's"), ("role", "An autoscaler's")):
        out = CliRunner().invoke(build(), [command, "--help"], env={"COLUMNS": "200"}).output
        assert f"{whose}, where services want certificates" in out


def test_help_breaks_lines_only_where_the_terminal_ends() -> None:
    out = CliRunner().invoke(build(), ["up", "--help"], env={"COLUMNS": "200"}).output
    assert "then to the prefill workers; more ranks than GPUs share them, and their memory. --gpus 4 is" in out


def test_config_has_every_service_that_up_starts() -> None:
    assert [each.value for each in Service] == list(MODULES)


def test_make_checkpoint_refuses_weights_beyond_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the weights would take .* GB or more, and {tmp_path} has"):
        build()(["make-checkpoint", str(tmp_path), "--set", "hidden_size=99999999999"], standalone_mode=False)
    assert not list(tmp_path.iterdir())


async def test_make_checkpoint_writes_one_that_up_accepts(tmp_path: Path) -> None:
    from launcher.preflight import check_model_dir

    directory = tmp_path / "tiny"
    arguments = ("make-checkpoint", str(directory), "--preset", "tiny", "--set", "num_hidden_layers=2")
    status, out, err = await deepmesh(*arguments)
    assert status == 0, err
    assert out.startswith(f"wrote {directory} (")
    check_model_dir(directory)
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 2
    status, _, err = await deepmesh(*arguments)
    assert (status, "add --overwrite" in err) == (2, True)


@pytest.mark.parametrize("setting", ["no_value", "=1", "a=[1"])
async def test_make_checkpoint_refuses_a_malformed_setting(tmp_path: Path, setting: str) -> None:
    status, _, err = await deepmesh("make-checkpoint", str(tmp_path / "c"), "--set", setting)
    assert (status, err.startswith(f"deepmesh: --set {setting}")) == (2, True)


async def test_bench_names_the_option_that_is_wrong() -> None:
    status, _, err = await deepmesh("bench", "--rate", "-1")
    assert (status, err.startswith("deepmesh: bench: rate:")) == (2, True)


@pytest.mark.parametrize("widths", ["0", "a,b", "1,,2", "-1", "99999999999"])
def test_calibrate_refuses_widths_that_are_no_numbers(widths: str) -> None:
    ended = CliRunner().invoke(build(), ["calibrate", "--widths", widths])
    assert (ended.exit_code, "expected numbers such as 1,4,16" in ended.output) == (2, True)


async def test_calibrate_measures_nothing_that_it_cannot_write(tmp_path: Path) -> None:
    status, out, err = await deepmesh("calibrate", "--out", str(tmp_path), "--endpoint", NOWHERE)
    assert (status, out, err) == (2, "", f"deepmesh: cannot write {tmp_path}: Is a directory\n")


async def test_eval_refuses_more_problems_than_can_be_drawn() -> None:
    status, _, err = await deepmesh("eval", "--url", f"http://{NOWHERE}/v1", "--problems", "99999999999999")
    assert (status, err) == (2, "deepmesh: eval: problems: expected integer >= 1 and <= 10000\n")


async def test_the_version_is_that_of_the_distribution() -> None:
    assert await deepmesh("--version") == (0, f"deepmesh {importlib.metadata.version('deepmesh')}\n", "")


@pytest.mark.parametrize(
    "command", ["", "up", "chat", "status", "bench", "demo", "quantize", "make-checkpoint", "eval"]
)
def test_help_names_values_in_words_of_its_own(command: str) -> None:
    # Arguments are named before their type.
    out = CliRunner().invoke(build(), [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    options = out[out.index("Options") :]
    assert not re.search("<(int|str|bool|float|path)", options)


def test_a_shell_completes_the_commands() -> None:
    words = {"_TYPER_COMPLETE_ARGS": "deepmesh be", "_DEEPMESH_COMPLETE": "complete_zsh"}
    assert "bench" in CliRunner().invoke(build(), [], env=words, prog_name="deepmesh").output


async def test_status_watches_until_ctrl_c() -> None:
    async with scheduler() as server:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", DEEPMESH, "status", "--watch", "--json", "--scheduler", server.endpoint],
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        lines = [json.loads(await process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    assert [line["workers"][0]["identity"]["worker_id"] for line in lines] == ["decode-7", "decode-7"]


async def test_status_watches_into_a_pipe() -> None:
    async with scheduler() as server:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", DEEPMESH, "status", "--watch", "--scheduler", server.endpoint],
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        seen = 0
        while seen < 2:
            seen += (await process.stdout.readline()).count(b"decode-7")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0

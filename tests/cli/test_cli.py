import asyncio
import importlib.metadata
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from deepmesh.internal.v1 import kvstore_pb2, scheduler_pb2, scheduler_pb2_grpc, workers_pb2
from typer.testing import CliRunner

from capacity.shapes import DEEPSEEK_R1, EXPERTS
from cli.commands import build
from cli.config import Service
from cli.main import INTERRUPTED
from launcher.plan import MODULES, MeshPlan, ServiceSpec
from mesh.config import ServerConfig
from mesh.errors import CheckpointError, ConfigError
from mesh.ports import free_port
from mesh.rpc.server import MeshServer, Registration
from tests.support.addresses import NOWHERE
from tests.support.command import run_here
from tests.support.programs import ROOT, run_program
from tests.support.scripted_gateway import Delta, ScriptedGateway
from tests.support.situations import card_of
from tools.make_checkpoint import checkpoint_config

DEEPMESH = "import sys; from cli.main import main; sys.argv[0] = 'deepmesh'; main()"


async def deepmesh(*arguments: str, stdin: str = "", **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, run in a thread of this process."""
    return await asyncio.to_thread(run_here, arguments, stdin, environment)


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


async def test_up_refuses_a_taken_port_before_it_starts_anything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Somebody else's mesh may have the default ones.
        others = ("--grpc-port", str(free_port()), "--scheduler-port", str(free_port()))
        oracle = ("--set", "decode.engine.backend=oracle")
        status, out, err = await deepmesh("up", "--http-port", str(port), *others, *oracle)
    assert (status, out) == (2, "")
    assert err == (
        f"deepmesh: cannot listen on 127.0.0.1:{port} (address already in use): choose another with --http-port\n"
    )


async def test_up_refuses_a_model_that_is_not_there(tmp_path: Path) -> None:
    status, out, err = await deepmesh("up", "--model", str(tmp_path / "none"))
    assert (status, out) == (2, "")
    assert err.startswith(f"deepmesh: there is no directory {tmp_path / 'none'}: deepmesh serves")


async def test_up_refuses_a_setting_of_no_service() -> None:
    status, _, err = await deepmesh("up", "--set", "engine.max_requests=8")
    assert (status, "expected SERVICE.KEY=VALUE" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--gpus", "4", "--split", "1P+2D"), "--split 1P+2D does not divide --gpus 4"),
        (("--split", "1P+1D"), "--split says who gets which of --gpus: give their number, too"),
        (("--gpus", "4", "--prefill", "1"), "--gpus divides all of them: give --split, not --decode, --prefill or"),
    ],
)
def test_up_refuses_a_wrong_split_with_one_sentence(arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        build()(["up", *arguments], standalone_mode=False)


def test_up_refuses_to_divide_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.up.find_gpus", lambda: ("0", "1"))
    with pytest.raises(ConfigError, match="--gpus 4: there are 2"):
        build()(["up", "--gpus", "4"], standalone_mode=False)


def test_up_draws_weights_of_a_model_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServiceSpec] = []

    async def record(plan: MeshPlan, specs: Sequence[ServiceSpec], keys: object) -> None:
        started.extend(specs)

    monkeypatch.setattr("cli.up._run", record)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint_config("tiny")))
    (tmp_path / "tokenizer.json").write_text("{}")
    ports = ("--http-port", "--grpc-port", "--scheduler-port")
    command = ["up", "--model", str(tmp_path), "--metrics-port", "0", *(f"{each}={free_port()}" for each in ports)]
    with pytest.raises(CheckpointError, match="holds no weights"):
        build()(command, standalone_mode=False)
    build()([*command, "--random-weights"], standalone_mode=False)
    assert any("engine.random_weights=true" in spec.settings for spec in started if spec.name == "decode-0")


@pytest.mark.parametrize(("cards", "ranks"), [(8, 4), (4, 4)])
def test_up_takes_as_few_gpus_as_hold_the_model(
    cards: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ServiceSpec] = []
    machine(monkeypatch, cards, started)
    build()(["up", *r1_in(tmp_path), "--random-weights", "--aim", "throughput"], standalone_mode=False)
    (worker,) = (spec for spec in started if spec.gpu is not None)
    assert worker.gpu is not None and worker.gpu.ranks == ranks
    assert "engine.aim=throughput" in worker.settings


@pytest.mark.parametrize(("cards", "told"), [(2, "take 4 GPUs"), (8, "lower engine.max_step_tokens to at most")])
def test_up_refuses_what_its_cards_cannot_hold(
    cards: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, cards, [])
    steps = [] if cards == 2 else ["--gpus", "8", "--set", "decode.engine.max_step_tokens=1000000"]
    with pytest.raises(ConfigError, match=f"^decode-0: .*{told}"):
        build()(["up", *r1_in(tmp_path), "--random-weights", *steps], standalone_mode=False)


def machine(monkeypatch: pytest.MonkeyPatch, cards: int, started: list[ServiceSpec]) -> None:
    """A machine with this many H200, on which nothing is started."""

    async def record(plan: MeshPlan, specs: Sequence[ServiceSpec], keys: object) -> None:
        started.extend(specs)

    found = [card_of("h200")] * cards
    monkeypatch.setattr("cli.up._run", record)
    monkeypatch.setattr("cli.up.find_gpus", lambda: tuple(map(str, range(cards))))
    monkeypatch.setattr("launcher.memory.find_cards", lambda: found)
    monkeypatch.setattr("launcher.memory.cards_for", lambda engine: found)


def r1_in(directory: Path) -> list[str]:
    """Options that serve R1's shape with INT4 experts from this folder."""
    shape = {**DEEPSEEK_R1, "quantization_config": EXPERTS["w4a8"]}
    (directory / "config.json").write_text(json.dumps(shape, default=dict))
    (directory / "tokenizer.json").write_text("{}")
    ports = ("--http-port", "--grpc-port", "--scheduler-port")
    return ["--model", str(directory), "--metrics-port", "0", *(f"{each}={free_port()}" for each in ports)]


async def test_up_refuses_a_wrong_setting_before_it_starts_anything() -> None:
    status, out, err = await deepmesh("up", "--set", "decode.engine.max_request=8")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("deepmesh: decode-0: unknown key engine.max_request (did you mean engine.max_requests?)")


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

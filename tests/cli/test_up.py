"""What `deepmesh up` makes of its options, and what it refuses before it starts anything."""

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from capacity.shapes import DEEPSEEK_R1, EXPERTS
from cli.commands import build
from launcher.plan import MeshPlan, ServiceSpec
from mesh.errors import CheckpointError, ConfigError
from mesh.ports import free_port
from tests.support.command import deepmesh
from tests.support.situations import card_of
from tools.make_checkpoint import checkpoint_config


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

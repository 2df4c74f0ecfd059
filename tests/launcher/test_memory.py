"""How many GPUs workers take by themselves, and what is refused for lack of memory."""

import json
from pathlib import Path

import pytest

from capacity.shapes import DEEPSEEK_R1, EXPERTS, MOONLIGHT
from engine.config import EngineConfig
from launcher.composition import compose
from launcher.memory import check_machine_room, check_room, with_ranks
from launcher.plan import MeshPlan
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError
from mesh.memory.machine_memory import MachineMemory
from tests.support.situations import card_of


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight."""
    cards = [card_of("h200")] * 8
    monkeypatch.setattr("launcher.memory.find_cards", lambda: cards)
    monkeypatch.setattr("launcher.memory.cards_for", lambda engine: cards)


def folder(directory: Path, shape: object = DEEPSEEK_R1, experts: str | None = "w4a8") -> Path:
    quantization = {} if experts is None else {"quantization_config": EXPERTS[experts]}
    (directory / "config.json").write_text(json.dumps({**dict(shape), **quantization}, default=dict))  # type: ignore[call-overload]
    return directory


def planned(model: Path, *settings: str, gpus: int = 8, **workers: int) -> MeshPlan:
    return with_ranks(MeshPlan(model, gpus=tuple(map(str, range(gpus))), settings=settings, **workers))  # type: ignore[arg-type]


@pytest.mark.parametrize(("experts", "ranks"), [("w4a8", 4), ("fp8", 8)])
def test_a_worker_takes_as_few_gpus_as_hold_the_model(experts: str, ranks: int, h200: None, tmp_path: Path) -> None:
    assert planned(folder(tmp_path, experts=experts)).parallel == {"decode": {"ranks": ranks}}


def test_a_model_that_one_gpu_holds_takes_one(h200: None, tmp_path: Path) -> None:
    assert not planned(folder(tmp_path, MOONLIGHT, None)).parallel


@pytest.mark.parametrize(
    "settings",
    [("decode.engine.parallel.dp=2",), ("decode.engine={parallel: {tp: 2}}",), ("decode.engine.device=cpu",)],
)
def test_a_layout_or_device_that_is_given_stays(settings: tuple[str, ...], h200: None, tmp_path: Path) -> None:
    assert not planned(folder(tmp_path), *settings).parallel


def test_two_workers_take_what_each_needs(h200: None, tmp_path: Path) -> None:
    found = planned(folder(tmp_path), prefill_workers=1)
    assert found.parallel == {"decode": {"ranks": 4}, "prefill": {"ranks": 4}}


def test_workers_that_would_share_gpus_are_left_as_they_are(h200: None, tmp_path: Path) -> None:
    assert not planned(folder(tmp_path), decode_workers=3).parallel


def test_a_worker_without_room_is_refused_by_name(h200: None, tmp_path: Path) -> None:
    model = folder(tmp_path)
    (spec,) = (each for each in compose(MeshPlan(model, gpus=("0",))) if each.name == "decode-0")
    with pytest.raises(ConfigError, match=r"^decode-0: the model takes 358\.\d GB .*: take 4 GPUs \(--gpus 4"):
        check_room(spec, EngineConfig(model_dir=model), WorkerRole.DECODE)


def test_gpus_that_workers_share_have_parts_of_their_memory(h200: None, tmp_path: Path) -> None:
    model = folder(tmp_path, MOONLIGHT, None)
    (spec, _) = (each for each in compose(MeshPlan(model, 2, gpus=("0",))) if each.name.startswith("decode"))
    check_room(spec, EngineConfig(model_dir=model, memory_share=0.5), WorkerRole.DECODE)
    with pytest.raises(ConfigError, match=r"with 29\.8 GB"):
        check_room(spec, EngineConfig(model_dir=model, memory_share=0.2), WorkerRole.DECODE)


@pytest.mark.parametrize(
    ("settings", "workers", "takes"),
    [({}, 1, 63.8), ({"dtype": "bfloat16"}, 1, 31.9), ({}, 2, 127.7)],
    ids=["float32", "bfloat16", "two workers"],
)
def test_weights_beyond_the_machines_memory_are_refused(
    settings: dict[str, str], workers: int, takes: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = [
        EngineConfig.model_validate({"model_dir": folder(tmp_path, MOONLIGHT, None), "device": "cpu", **settings})
    ]
    monkeypatch.setattr("launcher.memory.machine_memory", lambda: MachineMemory(10**12, int((takes + 0.1) * 1e9)))
    check_machine_room(engines * workers)
    monkeypatch.setattr("launcher.memory.machine_memory", lambda: MachineMemory(10**12, int((takes - 0.1) * 1e9)))
    with pytest.raises(ConfigError, match=rf"take {takes} GB, and {takes - 0.1:.1f} GB of memory are available"):
        check_machine_room(engines * workers)

"""Prints the settings that a worker would choose, and what its memory would hold, without starting it."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cli.settings.services import WORKERS
from engine.config import EngineConfig
from engine.memory.rank_memory import GB, RankMemory
from engine.model.config import read_model_config
from engine.settings.card import Card, smallest
from engine.settings.fitting import check_fits
from engine.settings.here import cards_for, resolve_on
from mesh.config_values import load
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError


def engine_of(
    role: WorkerRole, model_dir: Path, gpus: int, aim: str, *, exact: bool, settings: Sequence[str]
) -> EngineConfig:
    """settings: KEY=VALUE of the service. Raises ConfigError."""
    # A worker has no default for its scheduler, which is not asked here.
    ours = {"scheduler": "127.0.0.1:8002", "engine.model_dir": str(model_dir), "engine.aim": aim, "engine.exact": exact}
    if gpus > 1:
        ours["engine.parallel.ranks"] = gpus
    if wrong := next((each for each in settings if each.startswith(f"{role.value}.")), None):
        raise ConfigError(f"--set {wrong}: leave out {role.value}., keys are those of this service")
    overrides = [*(f"{key}={json.dumps(value)}" for key, value in ours.items()), *settings]
    return load(WORKERS[role.value], overrides=overrides, origin="--set").engine


def cards_of(name: str | None, gpus: int, engine: EngineConfig) -> Sequence[Card]:
    """`gpus` cards of the named kind, or those of this machine; none if that has none. Raises ConfigError."""
    # Imported here: a command loads what it composes only when it runs.
    from capacity.cards import find_gpu

    if name is not None:
        known = find_gpu(name)
        return [Card(name.lower(), int(known.memory_bytes), known.capability)] * gpus
    found = cards_for(engine)
    if 0 < len(found) < gpus:
        raise ConfigError(f"--gpus {gpus}: there are {len(found)} here (--gpu NAME takes the figures of another card)")
    return found[:gpus]


def print_resolved(engine: EngineConfig, role: WorkerRole, cards: Sequence[Card], console: Console) -> None:
    """Raises CheckpointError, and ConfigError if it does not fit."""
    assert engine.model_dir is not None
    found = resolve_on(engine, role, cards)
    # What would be chosen for a model that has no room is of no use.
    memory = check_fits(read_model_config(engine.model_dir), smallest(cards), found.engine) if cards else None
    where = f"{len(cards)} x {smallest(cards).name}" if cards else "the CPU: defaults, unless you name a --gpu"
    console.print(Text(f"{role.value} worker on {where}, for {engine.aim}", style="bold"), soft_wrap=True)
    for choice in found.choices:
        console.print(Text(str(choice)), soft_wrap=True)
    if memory is not None:
        console.print(Text(_memory(memory)), soft_wrap=True)


def _memory(memory: RankMemory) -> str:
    parts = ("weights", "copies", "drafts", "work", "graphs", "exchange", "transfers", "library")
    sizes = {part: getattr(memory, part) / GB for part in parts}
    listed = ", ".join(f"{part} {size:.1f}" for part, size in sizes.items() if size >= 0.05)
    return f"memory of a GPU, reckoned, GB: {listed}; KV {memory.kv_tokens:,} tokens"

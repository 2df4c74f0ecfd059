"""Workers whose settings are to be chosen."""

from dataclasses import replace
from typing import Any

from capacity.cards import GPUS
from capacity.shapes import EXPERTS, SHAPES
from engine.config import EngineConfig
from engine.model.config import ModelConfig, parse_model_config
from engine.settings.card import Card
from engine.settings.resolve import Resolved, resolve_settings
from mesh.domain.workers import WorkerRole


def model_of(name: str = "r1", experts: str = "w4a8", **changes: Any) -> ModelConfig:
    """A published shape with one MTP module."""
    values = {**SHAPES[name], "num_nextn_predict_layers": 1, "quantization_config": EXPERTS[experts]}
    return replace(parse_model_config(values), **changes)


def card_of(name: str = "h200") -> Card:
    return Card(name, int(GPUS[name].memory_bytes), GPUS[name].capability)


def engine_of(ranks: int = 4, **settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model_dir": "R1", "parallel": {"ranks": ranks}} | settings)


def resolved(
    engine: EngineConfig | None = None,
    role: WorkerRole = WorkerRole.DECODE,
    model: ModelConfig | None = None,
    card: str | None = "h200",
    *,
    drafts: bool = True,
    **options: Any,
) -> Resolved:
    engine, cards = engine or engine_of(), [] if card is None else [card_of(card)] * 8
    return resolve_settings(engine, role, model or model_of(), cards, drafts=drafts, **options)


def reason(found: Resolved, key: str) -> str:
    (choice,) = (each for each in found.choices if each.key == key)
    return choice.reason

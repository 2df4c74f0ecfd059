"""Settles every performance setting that is not given, from model, card, ranks and role, with reasons. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.parallel.layout import Layout
from engine.settings.card import Card, smallest
from engine.settings.choice import Choice, value_of
from engine.settings.device import kept_weights
from engine.settings.layout import choose_parallel
from engine.settings.quality import SHOWN, Shown
from engine.settings.rules import NO_TRANSFERS, RULES, Situation, given
from mesh.config_values import validate
from mesh.domain.workers import WorkerRole


@dataclass(frozen=True)
class Resolved:
    """engine: with every setting that a rule is about; what depends on the device alone is settled in the rank
    (`engine.settings.device`). choices: one of each rule, in their order.
    """

    engine: EngineConfig
    choices: Sequence[Choice]

    @property
    def told(self) -> Sequence[Choice]:
        """What an operator should see once: settings that are not as by default, and formats that stay as published."""
        return [each for each in self.choices if each.differs or each.reason.startswith("as published: ")]


def resolve_settings(
    engine: EngineConfig,
    role: WorkerRole,
    model: ModelConfig | None,
    cards: Sequence[Card],
    *,
    drafts: bool,
    shown: Mapping[tuple[str, str], Shown] = SHOWN,
) -> Resolved:
    """Given settings always win. model: None for the oracle. cards: those of the worker's host; none on a CPU, where
    only the layout is chosen, since the defaults are what was measured there (docs/performance-cpu.md). drafts: whether
    the checkpoint has MTP modules. Raises ConfigError.
    """
    parallel, why = choose_parallel(engine, role, model)
    layout = Layout.of(parallel)
    settled, choices = engine.model_copy(update={"parallel": parallel}), []
    if layout.world > 1:
        named = f"tp {layout.tp}, dp {layout.dp}, ep {layout.ep}"
        choices.append(Choice("parallel", named, why, differs=why != "as configured"))
    # Several hosts with GPUs have served tiny models alone, and each would have to choose alike.
    if not cards or model is None or engine.device == "cpu" or layout.hosts > 1:
        return Resolved(settled, choices)
    at = Situation(model, smallest(cards), role, settled, drafts, kept_weights(engine, "cuda"), shown)
    for rule in RULES:
        choice = rule(at)
        choice = given(at, choice.key) or choice
        at = at if choice.reason == NO_TRANSFERS else at.changed(choice.key, choice.value)
        differs = choice.value is not None and choice.value != value_of(engine, choice.key)
        choices.append(replace(choice, differs=differs))
    return Resolved(validate(EngineConfig, at.engine.model_dump(), "engine"), choices)

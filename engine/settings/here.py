"""The settings of a worker on this machine."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from engine.config import EngineConfig
from engine.model.config import read_model_config
from engine.settings.card import Card, find_cards
from engine.settings.draft_modules import has_draft_modules
from engine.settings.resolve import Resolved, resolve_settings
from mesh.domain.workers import WorkerRole


def resolve_here(engine: EngineConfig, role: WorkerRole) -> Resolved:
    """Reads the model's description and asks the driver for cards. Raises CheckpointError, ConfigError."""
    if engine.backend == "oracle" or engine.model_dir is None:
        return resolve_settings(engine, role, None, (), drafts=False)
    return resolve_on(engine, role, cards_for(engine))


def resolve_on(engine: EngineConfig, role: WorkerRole, cards: Sequence[Card]) -> Resolved:
    """The same on these cards. Raises CheckpointError, ConfigError."""
    assert engine.model_dir is not None
    model = read_model_config(engine.model_dir)
    described = model.num_nextn_predict_layers > 0
    drafts = described and (engine.random_weights or has_draft_modules(engine.model_dir, model))
    return resolve_settings(engine, role, model, cards, drafts=drafts)


def cards_for(engine: EngineConfig) -> Sequence[Card]:
    """The cards that ranks of this configuration would compute on; none if they compute on the CPU."""
    return () if engine.device == "cpu" or not _torch_takes_gpus() else find_cards()


def _torch_takes_gpus() -> bool:
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False

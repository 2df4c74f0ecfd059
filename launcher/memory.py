"""How many GPUs each worker takes if that is not said, and whether GPUs, or the machine, have room for what workers are
to serve.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.memory.weight_bytes import weight_bytes
from engine.model.config import read_model_config
from engine.parallel.layout import Layout
from engine.settings.card import Card, find_cards, smallest
from engine.settings.device import kept_weights
from engine.settings.draft_modules import has_draft_modules
from engine.settings.fitting import check_fits, fewest_ranks
from engine.settings.here import cards_for, resolve_on
from launcher.composition import split_settings
from launcher.plan import MeshPlan, ServiceSpec
from launcher.workers import takes_gpu
from mesh.config_values import overridden, validate
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError
from mesh.memory.machine_memory import machine_memory


def with_ranks(plan: MeshPlan) -> MeshPlan:
    """Each worker with a rank on as few GPUs as hold the model, if one GPU does not and the settings say no layout.
    Nothing changes if the workers would have to share GPUs: `check_room` then says why they cannot.

    Raises CheckpointError for a model that is not served.
    """
    cards = find_cards() if plan.gpus else ()
    if not cards or plan.model_dir is None:
        return plan
    workers = {"decode": plan.decode_workers, "prefill": plan.prefill_workers}
    asked, chosen = split_settings(plan.settings), {}
    for service in (service for service, count in workers.items() if count):
        if not takes_gpu(asked[service]) or "parallel" in _engine(asked[service]):
            continue
        ranks = _fewest(plan, service, asked[service], cards)
        if ranks is not None and ranks > 1:
            chosen[service] = {"ranks": ranks}
    taken = sum(chosen.get(service, {"ranks": 1})["ranks"] * count for service, count in workers.items())
    return replace(plan, parallel={**plan.parallel, **chosen}) if taken <= len(plan.gpus) else plan


def check_room(spec: ServiceSpec, engine: EngineConfig, role: WorkerRole) -> None:
    """By config.json and the index alone. Raises ConfigError if the worker's GPUs have no room, with what fits, and
    CheckpointError for a model that is not served.
    """
    if engine.backend == "oracle" or engine.model_dir is None or spec.gpu is None or not (cards := cards_for(engine)):
        return
    try:
        check_fits(read_model_config(engine.model_dir), smallest(cards), resolve_on(engine, role, cards).engine)
    except ConfigError as error:
        raise ConfigError(f"{spec.name}: {error.message}") from error


def check_machine_room(engines: Iterable[EngineConfig]) -> None:
    """By config.json alone. Raises ConfigError if the weights of those that compute on the CPU are larger than what the
    machine, or the container, has left: the kernel would kill workers that load them, again and again.
    """
    weights = sum(_bytes_on_cpu(engine) for engine in engines if engine.backend == "model" and not cards_for(engine))
    if weights > (room := machine_memory().room):
        asked, there = (f"{size / 1e9:,.1f} GB" for size in (weights, room))
        raise ConfigError(
            f"without GPUs the weights of all workers take {asked}, and {there} of memory are available: free memory,"
            " start fewer workers, or serve a smaller model"
        )


def _bytes_on_cpu(engine: EngineConfig) -> int:
    """The weights of all ranks of a worker on this host, at least: what ranks hold twice counts once."""
    if engine.model_dir is None:
        return 0
    kept = kept_weights(engine, "cpu")
    stored = weight_bytes(read_model_config(engine.model_dir), Layout(), kept).total
    # Weights that are not kept as published are counted in bfloat16.
    in_float32 = kept == "dequantized" and engine.dtype != "bfloat16"
    return stored * (2 if in_float32 else 1) // engine.parallel.hosts


def _fewest(plan: MeshPlan, service: str, settings: Sequence[str], cards: Sequence[Card]) -> int | None:
    assert plan.model_dir is not None
    model = read_model_config(plan.model_dir)
    engine = validate(EngineConfig, {"model_dir": plan.model_dir, **_engine(settings)}, service)
    drafts = engine.random_weights or has_draft_modules(plan.model_dir, model)
    most = min(len(plan.gpus), len(cards))
    return fewest_ranks(engine, WorkerRole(service), model, smallest(cards), drafts=drafts, most=most)


def _engine(settings: Sequence[str]) -> dict[str, object]:
    values = overridden(settings).get("engine")
    return values if isinstance(values, dict) else {}

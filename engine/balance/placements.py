"""Where the experts of each layer are when a worker starts."""

import json
from collections.abc import Mapping
from pathlib import Path

from engine.balance.config import BalanceConfig
from engine.balance.placement import ExpertPlacement, first_placement
from engine.parallel.layout import Layout
from mesh.errors import ConfigError
from mesh.text_files import read_text


def first_placements(config: BalanceConfig, layout: Layout, experts: int, layers: range) -> dict[int, ExpertPlacement]:
    """By layer; empty if experts lie in order and stay there. layers: those that have `experts` experts.

    Raises ConfigError if there is room for more copies than can be, or if the file does not fit.
    """
    if layout.ep == 1 or (config.interval_steps is None and not config.redundant and config.placement_file is None):
        return {}
    most = experts - experts // layout.ep
    if config.redundant > most:
        raise ConfigError(
            f"engine.balance.redundant={config.redundant}: a part has {experts // layout.ep} of {experts} experts, so"
            f" there is room for at most {most} copies of others"
        )
    first = first_placement(experts, layout.ep, config.redundant)
    saved = {} if config.placement_file is None else _saved(config.placement_file, first, experts)
    return {layer: saved.get(layer, first) for layer in layers}


def _saved(path: Path, like: ExpertPlacement, experts: int) -> Mapping[int, ExpertPlacement]:
    if not path.exists():
        return {}
    try:
        held = {int(layer): tuple(map(int, each)) for layer, each in json.loads(read_text(path)).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"engine.balance.placement_file={path} cannot be read: {error}") from error
    for layer, each in held.items():
        placement = ExpertPlacement(each, like.parts) if len(each) == len(like.experts) else None
        fits = placement is not None and set(each) == set(range(experts))
        if placement is None or not fits or any(_repeats(placement.part(part)) for part in range(like.parts)):
            raise ConfigError(
                f"engine.balance.placement_file={path} places layer {layer} otherwise than {like.parts} parts of"
                f" {like.slots} slots can hold {experts} experts: delete it, or set engine.parallel.ep and"
                " engine.balance.redundant as they were"
            )
    return {layer: ExpertPlacement(each, like.parts) for layer, each in held.items()}


def _repeats(held: tuple[int, ...]) -> bool:
    return len(set(held)) < len(held)

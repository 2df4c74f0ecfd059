"""Where the experts of each layer are when a worker starts."""

import json
from collections.abc import Mapping
from pathlib import Path

from engine.balance.config import BalanceConfig
from engine.balance.placement import ANYWHERE, ExpertPlacement, Grouping, first_placement, slots_of
from engine.model.config import ModelConfig
from engine.parallel.layout import Layout
from mesh.errors import ConfigError
from mesh.text_files import read_text


def grouping_of(config: BalanceConfig, layout: Layout, groups: int) -> Grouping:
    """Which experts are kept on one host. groups: of the model's experts."""
    hosts = layout.hosts_of_parts
    # Nothing can be evened within a host that has one part.
    kept = config.groups_on_hosts and groups % hosts == 0 and layout.ep > hosts
    return Grouping(hosts, groups) if kept else ANYWHERE


def first_placements(config: BalanceConfig, layout: Layout, model: ModelConfig) -> dict[int, ExpertPlacement]:
    """By layer; empty if experts lie in order and stay there. Experts of layers that draft stay in any case, and have
    copies only where the parts would not have equally many otherwise.

    Raises ConfigError if there is room for more copies than can be, or if the file does not fit.
    """
    experts, parts = model.n_routed_experts, layout.ep
    even = experts % parts == 0
    stay = config.interval_steps is None and not config.redundant and config.placement_file is None
    if parts == 1 or (stay and even):
        return {}
    grouping = grouping_of(config, layout, model.n_group)
    own, most = slots_of(experts, parts, 0), experts // grouping.hosts
    if own + config.redundant > most:
        where = f"{experts} experts" if grouping.hosts == 1 else f"{most} experts of its host"
        raise ConfigError(
            f"engine.balance.redundant={config.redundant}: a part has {own} of the {where}, so there is room for at"
            f" most {most - own} copies of others"
        )
    first = first_placement(experts, parts, config.redundant, grouping)
    saved = {} if config.placement_file is None else _saved(config.placement_file, first, experts)
    layers = range(min(model.first_k_dense_replace, model.num_hidden_layers), model.num_hidden_layers)
    placed = {layer: saved.get(layer, first) for layer in layers}
    if not even:
        drafting = first_placement(experts, parts, 0, grouping)
        placed |= dict.fromkeys(range(model.num_hidden_layers, model.kv_layers), drafting)
    return placed


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

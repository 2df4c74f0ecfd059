"""Whether a configuration fits its cards, and what to change if it does not. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from engine.config import EngineConfig
from engine.memory.rank_memory import GB, RankMemory, largest, reckon
from engine.model.config import ModelConfig
from engine.model.quantization import AT_LOAD, KeptWeights, Stored
from engine.parallel.layout import Layout
from engine.settings.card import Card
from engine.settings.choice import value_of, with_value
from engine.settings.device import kept_weights
from engine.settings.products import check_products, multiplies
from engine.settings.resolve import resolve_settings
from engine.settings.rules import FEWEST_REQUESTS, REQUEST_TOKENS
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError

# The engine serves with no less.
FEWEST_BLOCKS = 2
# As many ranks as a worker may have on GPUs of one host, where experts divide evenly.
RANKS = (1, 2, 4, 8)


def check_fits(model: ModelConfig, card: Card, engine: EngineConfig) -> RankMemory:
    """engine: with every setting chosen. Raises ConfigError in a sentence with the largest values that fit, or with
    what the model itself needs.
    """
    kept = kept_weights(engine, "cuda")
    check_products(model.quantization.kept(kept), card)
    found = reckon(model, card, engine, kept)
    if _fits(found):
        return found
    lowered: list[str] = []
    for key, value, least in _sizes(engine):
        if not _fits(reckon(model, card, with_value(engine, key, least), kept)):
            engine = with_value(engine, key, least)
            lowered += [f"engine.{key} to {least}"] if least != value else []
            continue
        most = _most(model, card, engine, kept, key, least, value)
        wanted = " and ".join([*lowered, f"engine.{key} to at most {most}"])
        raise ConfigError(
            f"weights and steps take {found.taken / GB:.1f} GB and leave too little for KV on {_named(card, found)}:"
            f" lower {wanted}"
        )
    raise ConfigError(_too_large(model, card, engine, found))


def fewest_ranks(
    engine: EngineConfig, role: WorkerRole, model: ModelConfig, card: Card, *, drafts: bool, most: int
) -> int | None:
    """The fewest ranks on which the model leaves room for several requests, with the settings that would be chosen;
    None if `most` are too few.
    """
    for ranks in (each for each in RANKS if each <= most):
        asked = with_value(engine, "parallel.ranks", ranks)
        try:
            chosen = resolve_settings(asked, role, model, [card] * ranks, drafts=drafts).engine
            found = reckon(model, card, chosen, kept_weights(chosen, "cuda"))
        except ConfigError:
            continue
        if found.kv_tokens >= FEWEST_REQUESTS * REQUEST_TOKENS:
            return ranks
    return None


def _fits(found: RankMemory) -> bool:
    return found.blocks >= FEWEST_BLOCKS


def _most(
    model: ModelConfig, card: Card, engine: EngineConfig, kept: KeptWeights, key: str, least: int, value: int
) -> int:
    """The largest value of the key that fits; `least` does."""

    def fits(more: int) -> bool:
        return _fits(reckon(model, card, with_value(engine, key, least + more), kept))

    return least + largest(fits, value - least)


def _sizes(engine: EngineConfig) -> Iterator[tuple[str, int, int]]:
    """Keys that take memory, with their values and the least that they may be; first those that are missed least."""
    drafts = engine.drafts.most
    steps = max(64, engine.max_requests * (1 + drafts))
    for key, least in (
        ("total_blocks", FEWEST_BLOCKS),
        ("balance.redundant", 0),
        ("transfer.slots", 2),
        ("max_step_tokens", steps),
        ("max_requests", 1),
    ):
        section = key.rpartition(".")[0]
        value = None if section and value_of(engine, section) is None else value_of(engine, key)
        if value is not None:
            yield key, value, min(least, value)


def _too_large(model: ModelConfig, card: Card, engine: EngineConfig, found: RankMemory) -> str:
    world = Layout.of(engine.parallel).world
    said = f"the model takes {found.weights / GB:.1f} GB on {f'each of {world} GPUs' if world > 1 else 'one GPU'}"
    more = _ranks_that_fit(model, card, engine, 2 * world)
    remedies = [f"take {more} GPUs (--gpus {more}, or engine.parallel.ranks={more})"] if more else []
    if not model.quantization.quantized:
        for weights, kept in AT_LOAD.items():
            if multiplies(kept, card) and _fits(reckon(model, card, engine, weights)):
                remedies.append(f"quantize it while it loads (engine.weights={weights})")
                break
    elif (fewer := _ranks_that_fit_int4(model, card, engine, world)) and (more is None or fewer < more):
        also = f" and take {fewer} GPUs" if fewer > world else ""
        remedies.append(f"quantize its experts to INT4 (deepmesh quantize --format w4a8){also}")
    elif not more:
        remedies.append("take cards with more memory, or a checkpoint with smaller experts (deepmesh quantize)")
    return f"{said}, and {_named(card, found)} has too little: {', or '.join(remedies) or 'take larger cards'}"


def _ranks_that_fit(model: ModelConfig, card: Card, engine: EngineConfig, least: int) -> int | None:
    kept = kept_weights(engine, "cuda")
    for ranks in (each for each in RANKS if each >= least):
        parallel = engine.parallel.model_copy(update={"ranks": None, "tp": 1, "dp": ranks, "ep": ranks})
        try:
            if _fits(reckon(model, card, engine.model_copy(update={"parallel": parallel}), kept)):
                return ranks
        except ConfigError:
            continue
    return None


def _ranks_that_fit_int4(model: ModelConfig, card: Card, engine: EngineConfig, least: int) -> int | None:
    """The same of the model with its FP8 experts in INT4; None if it has others, or INT4 is nothing for the card."""
    quantization = replace(model.quantization, experts=Stored.INT4)
    if model.quantization.experts is not Stored.FP8 or not multiplies(quantization, card):
        return None
    return _ranks_that_fit(replace(model, quantization=quantization), card, engine, least)


def _named(card: Card, found: RankMemory) -> str:
    return f"one {card.name} with {found.there / GB:.1f} GB"

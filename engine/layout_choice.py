"""Chooses how ranks divide a model where only their number is configured."""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.model.config import read_model_config
from engine.model.share import check_division
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError


def choose_parallel(config: EngineConfig, role: WorkerRole) -> tuple[ParallelConfig, str]:
    """The whole layout of a worker of this role, and why it is so. Raises CheckpointError."""
    asked = config.parallel
    if asked.tp is not None or asked.dp is not None or asked.world == 1:
        layout, why = Layout.of(asked), "as configured"
    else:
        tp, why = choose_tp(asked.ranks_a_host, role, lambda tp: _divides(config, tp))
        layout = Layout(tp, asked.world // tp, asked.ep or asked.world)
    return asked.model_copy(update={"ranks": None, "tp": layout.tp, "dp": layout.dp, "ep": layout.ep}), why


def choose_tp(ranks: int, role: WorkerRole, divides: Callable[[int], bool]) -> tuple[int, str]:
    """How many of a worker's ranks compute a request together, and why; the rest of the factors is dp. Pure.

    ranks: how many there are on one host; divides: whether that many ranks can divide the model.
    """
    if role is not WorkerRole.PREFILL:
        return 1, "ranks that decode batch requests of their own, so that none holds a copy of another's KV"
    tp = next(tp for tp in range(ranks, 0, -1) if ranks % tp == 0 and divides(tp))
    if tp == 1:
        return 1, "no number of ranks divides the model's heads, vocabulary and dense layers"
    return tp, "ranks compute a prompt together, so that its first token comes as early as can be"


def _divides(config: EngineConfig, tp: int) -> bool:
    if config.model_dir is None:
        return True
    model = read_model_config(config.model_dir)
    try:
        check_division(model, tp, blocks=model.quantization.has_blocks)
    except ConfigError:
        return False
    return True

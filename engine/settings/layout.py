"""Chooses how ranks divide a model where only their number is configured. Pure."""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.model.share import check_division, check_experts
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError

# The role of workers whose ranks compute each request together, and so that of ranks which are to answer one quickly.
TOGETHER = WorkerRole.PREFILL


def choose_parallel(config: EngineConfig, role: WorkerRole, model: ModelConfig | None) -> tuple[ParallelConfig, str]:
    """The whole layout of a worker of this role, and why it is so. model: None for one that divides in any way."""
    asked = config.parallel
    if asked.tp is not None or asked.dp is not None or asked.world == 1:
        layout, why = Layout.of(asked), "as configured"
    elif role is WorkerRole.DECODE and config.aim == "latency":
        tp, why = choose_tp(asked.ranks_a_host, TOGETHER, lambda tp: _divides(model, Layout(tp=tp)))
        if tp > 1:
            why = "one answer as fast as can be: 214 tokens/s on four H200, for 115 with a rank for each request"
        layout = Layout(tp, asked.world // tp, asked.ep or (1 if tp == asked.world else asked.world))
    else:
        tp, why = choose_tp(asked.ranks_a_host, role, lambda tp: _divides(model, Layout(tp=tp, ep=tp)))
        layout = Layout(tp, asked.world // tp, asked.ep or asked.world)
    return asked.model_copy(update={"ranks": None, "tp": layout.tp, "dp": layout.dp, "ep": layout.ep}), why


def choose_tp(ranks: int, role: WorkerRole, divides: Callable[[int], bool]) -> tuple[int, str]:
    """How many of a worker's ranks compute a request together, and why; the rest of the factors is dp.

    ranks: how many there are on one host; divides: whether that many ranks can divide the model.
    """
    if role is not TOGETHER:
        return 1, "ranks that decode batch requests of their own, so that none holds a copy of another's KV"
    tp = next(tp for tp in range(ranks, 0, -1) if ranks % tp == 0 and divides(tp))
    if tp == 1:
        return 1, "no number of ranks divides the model's heads, vocabulary and dense layers"
    return tp, "ranks compute a prompt together, so that its first token comes as early as can be"


def _divides(model: ModelConfig | None, layout: Layout) -> bool:
    if model is None:
        return True
    blocks = model.quantization.has_blocks
    try:
        check_division(model, layout.tp, blocks=blocks)
        if layout.ep == 1:
            check_experts(model, layout, blocks=blocks)
    except ConfigError:
        return False
    return True

"""First runs of a model's steps on a GPU, of several kinds at once, so that their kernels are compiled at once.

With cold caches that takes longer than all else in a start, and one thread would compile one kernel after the other;
Triton lets others run for most of that time. All threads launch on one stream, where kernels run one after another
whoever launched them, and each has a pool and scratch memory of its own. No result is read.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from threading import Thread

import torch

from engine.batch import Batch, Row
from engine.memory.pool_plan import device_state
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.runner.graph_sizes import graph_sizes
from engine.runner.micro_batches import MicroBatches
from engine.runner.sampler import draw_nothing
from engine.runner.sizes import padded_size
from engine.runner.steps import Steps
from engine.runner.warm_up import GREEDY, StepKind, decoding_steps, kind_of, warm_up_steps
from engine.settings.device import ResolvedEngineConfig
from engine.step.shape import shape_of
from engine.step.two_batch import NEVER

_log = logging.getLogger("deepmesh.engine")

# The pool that each thread has, which no request reads.
BLOCKS = 15

Make = Callable[[Model, DeviceState, MicroBatches], Steps]


class Kind(Enum):
    """Steps of a kind launch many kernels that those of the others do not."""

    # Whole prompts, and chunks after a prefix.
    PROMPTS = auto()
    LATER = auto()
    # Rows that decode next to a prompt, and alone.
    MIXED = auto()
    DECODING = auto()
    # Draws in all ways.
    DRAWING = auto()


def run_first(
    make: Make, model: Model, resolved: ResolvedEngineConfig, sizes: Sequence[int], longest: int, warm: set[StepKind]
) -> None:
    """Run the warm-up's steps over few layers, those of each kind in a thread, and add them to those that are `warm`;
    and as many rows as graphs have. longest: tokens of a context. What fails is logged, and fails again where it is
    needed.
    """
    config, sparse = resolved.config, resolved.config.sparse_prefill.offered
    steps = [*warm_up_steps(sizes, longest, config.max_requests, BLOCKS, sparse=sparse)]
    # Graphs with more rows than requests have the kernels of the largest of these.
    counts = [count for count in graph_sizes(config) if count <= config.max_requests]
    steps += decoding_steps(counts, longest, BLOCKS)
    of_kind: dict[Kind, list[Sequence[Row]]] = defaultdict(list)
    for rows in steps:
        of_kind[_kind_of(rows)].append(rows)

    def run(kind: Kind) -> None:
        # Graphs have their rows alone; other steps are padded.
        size = partial(padded_size, sizes=() if kind is Kind.DECODING else sizes)
        _run(make, model.short(), resolved, longest, MicroBatches(NEVER, size), of_kind[kind], warm)

    threads = [_begin(kind.name.lower(), partial(run, kind)) for kind in of_kind]
    for thread in threads:
        thread.join()
    if model.device.type == "cuda":
        # Each thread's products had a workspace of their own, which torch would keep.
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def compiling_draws(vocabulary_size: int, resolved: ResolvedEngineConfig) -> Iterator[None]:
    """Compile what draws tokens, of any model and any number of ranks, while its weights are loaded: with cold caches
    seven Triton kernels of 35 that R1 needs, and 2.7 of the 11 s that these take.
    """
    if not resolved.warm_up:
        yield
        return
    dtype = getattr(torch, resolved.dtype)
    thread = _begin("draws", partial(draw_nothing, vocabulary_size, dtype, torch.device(resolved.device)))
    try:
        yield
    finally:
        thread.join()


def _begin(what: str, run: Callable[[], None]) -> Thread:
    def logged() -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001
            fields = {"kind": what, "why": f"{type(error).__name__}: {error}"}
            _log.info("a first run failed", extra={"fields": fields})

    thread = Thread(target=logged, name=f"first {what}")
    thread.start()
    return thread


def can_run_at_once(model: Model, resolved: ResolvedEngineConfig) -> bool:
    """Whether it is known that threads may launch the steps: of a plain model in bfloat16. Others have not run so on a
    GPU, and deep_gemm's compiler, which FP8 may need, ends the process if several threads use it. Ranks of a group have
    to launch alike, and workers that share a GPU have less memory than several steps at once take.
    """
    config, dense = model.config, model.config.indexer is None and not model.config.draft_layers
    plain = not config.quantization.quantized and resolved.weights not in ("fp8", "w4a8")
    alone = not model.expert_group.divides and resolved.config.memory_share == 1
    return plain and dense and alone and resolved.dtype == "bfloat16"


@torch.inference_mode()
def _run(
    make: Make,
    model: Model,
    resolved: ResolvedEngineConfig,
    longest: int,
    batches: MicroBatches,
    each: Sequence[Sequence[Row]],
    warm: set[StepKind],
) -> None:
    state = device_state(model, resolved, BLOCKS, longest)
    steps = make(model, state, batches)
    for rows in each:
        shape = shape_of(rows)
        launched = steps.launch(Batch(0, rows), shape, None)
        launched.draw()
        launched.collect()
        if not shape.decode_only:
            warm.add(kind_of(state, rows, batches.size(shape.tokens), captured=False))


def _kind_of(rows: Sequence[Row]) -> Kind:
    if len({repr(row.sampling) for row in rows}) > 1 or rows[0].sampling not in (None, GREEDY):
        return Kind.DRAWING
    if rows[-1].decodes:
        return Kind.DECODING
    if rows[0].decodes:
        return Kind.MIXED
    return Kind.LATER if rows[0].start else Kind.PROMPTS

"""Times of steps as one batch and as two micro-batches, measured before a worker serves."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from engine.batch import Row
from engine.config import EngineConfig
from engine.model.context import DeviceState
from engine.model.inputs import build_context
from engine.model.model import Model
from engine.runner import step_parts
from engine.runner.capture import CudaCapture
from engine.runner.micro_batches import MicroBatch, halves
from engine.settings.device import ResolvedEngineConfig
from engine.step.shape import shape_of
from engine.step.two_batch import ALWAYS, NEVER, TwoBatch
from mesh.blocks import blocks_for
from mesh.domain.sampling import Sampling
from mesh.observe.spans import span

_log = logging.getLogger("deepmesh.engine")

# Tokens of each context, if the model's context is that long.
CONTEXT_TOKENS = 4096
# On a GPU a step of fewer tokens is bound by the bytes of weights, which two halves read twice.
FEWEST_TOKENS_AHEAD = 64
# The quickest of this many runs counts, since others may use the machine. One run before them is not counted.
REPEATS = 3
# Two micro-batches have to be faster than one by this share.
GAIN = 0.02


def may_take_two(model: Model, config: EngineConfig) -> bool:
    """Whether steps may be computed in two micro-batches."""
    return config.parallel.two_batch != "off" and model.expert_group.divides


@torch.inference_mode()
def choose_two_batch(
    model: Model,
    state: DeviceState,
    resolved: ResolvedEngineConfig,
    context_tokens: int,
    size: Callable[[int], int],
) -> TwoBatch:
    """Called by all ranks of a worker at once. size: from a batch's tokens to the number that it is padded to."""
    config = resolved.config
    if not may_take_two(model, config):
        return NEVER
    if config.parallel.two_batch == "on":
        return ALWAYS
    step_tokens = min(config.max_step_tokens, config.max_requests * context_tokens)
    drafts = 1 if config.drafts.next_n == "auto" else config.drafts.next_n
    with span("engine.measure_two_batches"):
        timer = StepTimer(model, state, context_tokens, size, graphs=resolved.decode_graphs)
        return _measure(timer, config.max_requests, drafts, step_tokens)


class StepTimer:
    """Times the layers of steps. All ranks of a worker make the same calls at once."""

    def __init__(
        self, model: Model, state: DeviceState, context_tokens: int, size: Callable[[int], int], *, graphs: bool
    ) -> None:
        """size: from a batch's tokens to the number that it is padded to; graphs: whether decode steps are graphs."""
        self.device = model.device
        self._model = model
        self._state = state
        self._longest = min(CONTEXT_TOKENS, context_tokens)
        self._size = size
        self._graphs = graphs

    def decoding(self, count: int, drafts: int) -> list[Row]:
        """Rows that decode at the end of long contexts."""
        start = max(self._longest - 1 - drafts, 0)
        return [Row([0] * (1 + drafts), start, self._blocks(), Sampling(), drafts=drafts)] * count

    def prompts(self, tokens: int) -> list[Row]:
        """As few whole prompts as have this many tokens together."""
        whole, rest = divmod(tokens, self._longest)
        lengths = [self._longest] * whole + [rest] * (rest > 0)
        return [Row([0] * length, 0, self._blocks(), Sampling()) for length in lengths]

    def seconds(self, rows: Sequence[Row], *, halved: bool) -> float:
        """How many seconds the step takes on this rank."""
        shape = shape_of(rows)
        parts = halves(rows, shape, self._size) if halved else [MicroBatch(rows, self._size(shape.tokens))]
        contexts = [build_context(self._model.config, part.rows, self._state, part.size) for part in parts]

        def step() -> None:
            step_parts.logits(self._model, contexts)

        step()
        work = CudaCapture().whole(step) if self._graphs and shape.decode_only else step
        seconds = []
        for _ in range(1 + REPEATS):
            self._synchronize()
            started = time.perf_counter()
            work()
            self._synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    def slowest(self, seconds: float) -> float:
        """The largest of the numbers that all ranks pass."""
        return self._model.expert_group.largest(seconds)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _blocks(self) -> list[int]:
        """Padding blocks, whose contents do not matter."""
        return [self._state.padding_block] * blocks_for(self._longest)


def _measure(timer: StepTimer, max_requests: int, drafts: int, step_tokens: int) -> TwoBatch:
    """For up to max_requests rows with `drafts` drafts each, and for prompts of up to `step_tokens` tokens together."""
    fewest = FEWEST_TOKENS_AHEAD if timer.device.type == "cuda" else 2
    return TwoBatch(
        decoding=[
            (count * (1 + drafts), _wins(timer, timer.decoding(count, drafts)))
            for count in _doubling(-(-fewest // (1 + drafts)), max_requests)
        ],
        prompts=[(tokens, _wins(timer, timer.prompts(tokens))) for tokens in _doubling(fewest, step_tokens)],
    )


def _wins(timer: StepTimer, rows: Sequence[Row]) -> bool:
    """Whether these rows are computed faster in two micro-batches."""
    one, two = (timer.slowest(timer.seconds(rows, halved=halved)) for halved in (False, True))
    tokens = sum(row.tokens for row in rows)
    fields = {"tokens": tokens, "rows": len(rows), "one_ms": _ms(one), "two_ms": _ms(two)}
    _log.info("steps as one batch and as two micro-batches", extra={"fields": fields})
    return two < one * (1 - GAIN)


def _doubling(fewest: int, most: int) -> Iterator[int]:
    number = fewest
    while number < most:
        yield number
        number *= 2
    if most >= fewest:
        yield most


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)

"""How long drafting itself takes on a GPU: all that a step with drafts computes after its draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from engine.batch import Row
from engine.config import EngineConfig
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.runner.capture import Capture, CudaCapture
from engine.runner.sizes import capture_drafting
from engine.step.shape import StepShape
from engine.step.two_batch import NEVER
from mesh.blocks import blocks_for
from mesh.domain.sampling import Sampling

WARM_REPEATS, REPEATS = 3, 15


@dataclass(frozen=True)
class DraftOverhead:
    """Microseconds of a step of `requests` rows with `drafts` drafts each."""

    requests: int
    drafts: int
    # Work after the draws: verification, then the draft layer and the head once for each guess.
    drafting_us: float
    # One of the model's layers, as the mean over all of them, and the head over one row of each request.
    layer_us: float
    head_us: float
    # The least time for the work after the draws.
    floor_us: float

    @property
    def ratio(self) -> float:
        """The time of one guess, over that of one layer and the head."""
        return self.drafting_us / (self.drafts * (self.layer_us + self.head_us))


class DeviceClock:
    """Marks points in time on the device without making the host wait."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def microseconds(self) -> list[float]:
        """Microseconds between neighbouring marks. Waits for the device."""
        torch.cuda.synchronize()
        return [1000 * before.elapsed_time(after) for before, after in pairwise(self._events)]


@torch.inference_mode()
def measure_overhead(
    model: Model,
    state: DeviceState,
    config: EngineConfig,
    requests: int,
    context: int,
    floor_us: float,
    capture: Capture | None = None,
) -> DraftOverhead:
    """Measure drafting with the fixed number of drafts of `config`, none of which is right.

    It captures graphs of its own, in CUDA's unless `capture` says otherwise, and overwrites part of the pool.
    """
    drafts, capture = config.drafts.most, capture or CudaCapture()
    graphs = capture_drafting(model, state, config, [requests], context + 2 * drafts + 1, capture, NEVER)
    rows, shape = _rows(requests, drafts, context, state.padding_block)
    token_ids = torch.ones(shape.tokens, dtype=torch.int64, device=state.device)
    clock = DeviceClock()
    # After the first repeats the host is ahead of the device, so that no timed work waits for the host.
    for _ in range(WARM_REPEATS + REPEATS):
        clock.mark()
        layers = graphs.run(rows, shape)
        clock.mark()
        layers.finish(token_ids)
        clock.mark()
        model.logits(layers.hidden[:requests])
    clock.mark()
    counted = clock.microseconds()[3 * WARM_REPEATS :]
    layers_us, drafting_us, head_us = (median(counted[part::3]) for part in range(3))
    layer_us = layers_us / model.config.num_hidden_layers
    return DraftOverhead(requests, drafts, drafting_us, layer_us, head_us, floor_us)


def _rows(requests: int, drafts: int, context: int, blocks: int) -> tuple[Sequence[Row], StepShape]:
    """Rows that end at the context. Each has blocks of its own, as far as `blocks` blocks are enough."""
    each, start = blocks_for(context + drafts + 1), context - 1 - drafts
    own = ([block % blocks for block in range(row * each, (row + 1) * each)] for row in range(requests))
    rows = [Row([0] * (1 + drafts), start, block_ids, Sampling(), drafts=drafts) for block_ids in own]
    return rows, StepShape(requests * (1 + drafts), drafts=drafts, drawing=requests, rows=requests)

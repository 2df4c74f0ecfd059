"""A device that computes nothing: it takes the time of its cost model, and draws tokens that count down to the end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from math import isqrt
from typing import NamedTuple

from engine.balance.report import BalanceReport
from engine.batch import Batch, Row, Sample
from engine.pace.step_times import StepTimes
from engine.plan.step_plan import Chunk
from engine.protocol.messages import SparseMeasure
from engine.requests.request import Request
from engine.requests.thinking import ThinkTokens
from engine.step.shape import StepShape
from engine.step.step_work import StepWork
from mesh.costs import CostModel
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.outputs import PromptLogprobs
from mesh.domain.sparse_prefill import sparse_part
from mesh.domain.workers import PromptPace, WorkerSpeed
from sim.host_memory import SimulatedSlots
from transfer.memory import KvMemory

# A token's number says how many tokens follow it. A request therefore ends with token 0, and the last token of its
# prompt is the length of its answer.
END_OF_SEQUENCE = 0
LONGEST_OUTPUT = 1 << 20
# The other tokens of prompts have numbers from LONGEST_OUTPUT to below this.
VOCABULARY = 1 << 31
# A push that starts while later layers are still computed is told of finished layers in this many groups a step.
LAYER_GROUPS = 4


# What a step computes for one request: its first position, the position after its last, and the position from which
# attention is sparse (None: nowhere).
_Part = tuple[int, int, int | None]


class _Together(NamedTuple):
    """One rank's share of a chunk that all ranks compute."""

    tokens: int
    ms: float


_NOTHING_TOGETHER = _Together(0, 0.0)


def _part_of(chunk: Chunk[Request]) -> _Part:
    start = chunk.request.progress.computed_at_most
    return start, start + chunk.tokens, chunk.request.sparse_from


@dataclass(slots=True)
class LocalClock:
    """One rank's time. During a step it is ahead of the timeline's: it is the time at which the step ends."""

    now: float = 0.0
    in_step: bool = False

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a worker's engine needs to know of its device."""

    model: str
    namespace: KvNamespace
    context_tokens: int
    total_blocks: int
    block_bytes: int
    # See engine.backend.Backend.
    captured_rows: int = 0
    captured_prompt_tokens: int = 0
    speed: WorkerSpeed | None = None


def speed_of(costs: CostModel, requests: int, step_tokens: int, slowness: float) -> WorkerSpeed:
    """What a device measures before it serves: see engine.pace.first_speed. slowness: see SimulatedDevice."""
    prompt_seconds = costs.step_ms(0, 0, costs.prefill_ms(step_tokens)) / 1000 * slowness
    return WorkerSpeed(
        costs.decode_ms(isqrt(requests)) * slowness,
        float(isqrt(requests)),
        PromptPace(step_tokens / prompt_seconds, step_tokens / 2, float(step_tokens)),
    )


class SimulatedDevice:
    """engine.backend.Backend in simulated time. `slowness` stretches every step, as a card with low clocks does.

    `at` calls an action at a given time of the timeline.
    """

    eos_token_ids = frozenset({END_OF_SEQUENCE})
    vocabulary_size = VOCABULARY
    asynchronous = False
    draft_layers = 0
    think_tokens: ThinkTokens | None = None
    step_times: StepTimes | None = None
    balance: BalanceReport | None = None
    device_name = "simulated"

    def __init__(
        self,
        spec: DeviceSpec,
        costs: CostModel,
        clock: LocalClock,
        at: Callable[[float, Callable[[], None]], None],
        slots: SimulatedSlots | None = None,
    ) -> None:
        self.model, self.namespace = spec.model, spec.namespace
        self.context_tokens, self.total_blocks, self.block_bytes = (
            spec.context_tokens,
            spec.total_blocks,
            spec.block_bytes,
        )
        self.captured_rows, self.speed = spec.captured_rows, spec.speed
        self.captured_prompt_tokens = spec.captured_prompt_tokens
        self.slowness = 1.0
        # Seconds of the next step, the same on all ranks of a worker; None if the worker has a single rank.
        self.together_seconds: float | None = None
        self.busy_seconds = 0.0
        self._costs = costs
        self._clock = clock
        self._at = at
        self._slots = slots

    def kv_memory(self) -> KvMemory:
        raise AssertionError("a simulated device has no bytes")

    def host_slots(self) -> SimulatedSlots | None:
        return self._slots

    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        """There are no draft layers."""

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        """There is no attention."""
        return ()

    def launch(self, batch: Batch, shape: StepShape) -> "SimulatedStep":
        seconds = self.together_seconds
        if seconds is None:
            parts = ((row.start, row.end, None if row.sparse is None else row.sparse.from_tokens) for row in batch.rows)
            seconds = self._seconds(parts, shape.decode_only) * self.slowness
        if batch.on_layers is not None:
            self._report_layers(batch.on_layers, seconds)
        started = self._clock.now
        self._clock.now += seconds
        self.busy_seconds += self._clock.now - started
        return SimulatedStep(batch.rows)

    def seconds_of(
        self, work: StepWork, decode_only: bool, others_prompts: float, divided: Chunk[Request] | None, ranks: int
    ) -> float:
        """Seconds that this rank takes for its part of a step that its worker's ranks have not launched yet.

        decode_only: as in the step's shape. others_prompts: prompt tokens that each of the other ranks computes in the
        step, on average. divided: the chunk that all `ranks` ranks compute together, whichever rank it is of.
        """
        starts = [request.progress.computed_at_most for request in work.decoding]
        parts: list[_Part] = [(start, start + 1, None) for start in starts]
        parts += [_part_of(chunk) for chunk in work.chunks if chunk is not divided]
        prompts = max(1, work.prompt_tokens)
        alone = self._costs.prefill_alone
        share = alone + (1 - alone) * min(1.0, others_prompts / prompts)
        if divided is None:
            return self._seconds(parts, decode_only, share) * self.slowness
        # Each rank computes the same number of its tokens and attends to as many.
        together_ms = self._chunk_ms(*_part_of(divided)) / ranks
        together = _Together(-(-divided.tokens // ranks), together_ms)
        return self._seconds(parts, decode_only, share, together) * self.slowness

    def _seconds(
        self,
        parts: Iterable[_Part],
        decode_only: bool,
        prompts_share: float = 1.0,
        together: _Together = _NOTHING_TOGETHER,
    ) -> float:
        """prompts_share: factor on the time of chunks in `parts`."""
        decoding, context, tokens = 0, 0, together.tokens
        chunks_ms = 0.0
        for start, end, sparse_from in parts:
            if decode_only or end - start == 1:
                decoding += end - start
                context += (end - start) * (start + end - 1) // 2
            else:
                tokens += end - start
                chunks_ms += self._chunk_ms(start, end, sparse_from)
        step_ms = self._costs.step_ms(decoding, context, chunks_ms * prompts_share + together.ms)
        return max(step_ms, self._launch_ms(decoding, tokens)) / 1000

    def _launch_ms(self, decoding: int, prompt_tokens: int) -> float:
        """The host's time to launch a step with this many tokens of chunks."""
        if not prompt_tokens:
            return 0.0
        captured = decoding + prompt_tokens <= self.captured_prompt_tokens
        return self._costs.captured_launch_ms if captured else self._costs.launch_ms

    def _chunk_ms(self, start: int, end: int, sparse_from: int | None) -> float:
        sparse = sparse_part(start, end, sparse_from)
        exact_ms = self._costs.prefill_ms(end - start - sparse, start)
        return exact_ms + self._costs.sparse_prefill_ms(sparse, end - sparse)

    def decode_times(self, start: float, steps: int, requests: int, context: int) -> list[float]:
        """`start`, then the end of each of `steps` decode steps of `requests` requests.

        context: tokens before the first step's, of all requests together.
        """
        # If context costs nothing, all steps take the same time.
        differing = steps if self._costs.decode_context_ms or self._costs.index_context_ms else 1
        seconds = [
            self._costs.step_ms(requests, context + step * requests, 0.0) / 1000 * self.slowness
            for step in range(differing)
        ]
        return list(accumulate(seconds if differing == steps else repeat(seconds[0], steps), initial=start))

    def _report_layers(self, on_layers: Callable[[int], None], seconds: float) -> None:
        layers = self.namespace.layers
        for group in range(1, LAYER_GROUPS):
            written = layers * group // LAYER_GROUPS
            if written:
                self._at(self._clock.now + seconds * group / LAYER_GROUPS, lambda written=written: on_layers(written))  # type: ignore[misc]


class SimulatedStep:
    """engine.backend.Launched."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def draw(self) -> None:
        """Nothing to do: `collect` knows the tokens."""

    def collect(self) -> list[Sample | None]:
        return [None if row.sampling is None else Sample((row.token_ids[-1] - 1,)) for row in self._rows]

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        """Simulated requests ask for none."""
        return {}

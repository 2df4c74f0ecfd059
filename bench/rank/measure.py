"""The measurements of `bench.rank`: one engine, one GPU, decode steps by number of requests, and prefill."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from bench.rank.ceilings import SUSTAINED_SECONDS, measure_ceilings
from bench.rank.kernel_trace import trace_kernels
from bench.rank.load import RankLoad, fill_pool
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.power import EnergyCounter, Load, PowerMeter, PowerModel, measure_power
from bench.rank.steps import CONTEXT, SPARE_TOKENS, TRACED_STEPS, start_steps, time_steps, trace_steps
from capacity.ceilings import Ceilings
from capacity.floor import Operation, decode_floor, decode_operations
from engine.config import EngineConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve

STEP_TOKENS = 16384
PREFILL_PROMPTS = 19
TRACED_PROMPTS = 5
CHURNED_REQUESTS = 32
# Patterns of kernel names by what the kernels are for; the first match counts.
GROUPS = {
    "selection": r"^_?(write_keys|make_queries|(index|prompt)_scores_\d+|choose\w*|score|select|write_mask)$",
    "attention": r"^selected|mla|flash|splitkv|attend|^_?decode|^_join$|^combine$|^quantize_blocks$",
    "experts": r"w4a8|nvfp4|sorted_rows|_chosen_experts|_of_groups|_masked|_contiguous"
    r"|GemmType.*(Masked|Contiguous|[Gg]rouped)|GemmType\)[12]",
    "linear layers": r"fp8_gemm|few_rows|many_rows|_one_row|_dense",
    "bf16 products": r"gemm|nvjet|cutlass|cublas|splitK|gemv|_absorb|_expand_(values|pieces)"
    r"|_multiply_groups|multipl(ied|y_row)",
    "norms, rotation, quantization": r"norm|quantize|swiglu|_rotate",
    "gate and permutation": r"gate|_logits|_place|_copy_rows|_combine|_count|scatter|gather",
    "copies": r"[Mm]em(cpy|set)|Cat",
}


@dataclass(frozen=True)
class Decode:
    """Figures of one number of requests."""

    requests: int
    step_ms: float
    floor_ms: float
    # The floor at the rates that a card keeps up, which are those of steady decoding.
    sustained_floor_ms: float
    idle_share: float
    # Microseconds a step, by group of kernels.
    breakdown: dict[str, float]
    # By kernel name, the number of runs and the microseconds in all traced steps.
    kernels: dict[str, tuple[int, float]]
    operations: list[Operation]
    # Mean power of the timed steps, and the least time at the power limit; None if power was not measured.
    watts: float | None = None
    power_floor_ms: float | None = None

    @property
    def ratio(self) -> float:
        return self.step_ms / self.floor_ms

    @property
    def sustained_ratio(self) -> float:
        return self.step_ms / self.sustained_floor_ms

    @property
    def tokens_per_second(self) -> float:
        return self.requests / self.step_ms * 1000


@dataclass(frozen=True)
class Prefill:
    tokens_per_second: float
    # The most tokens of a step.
    step_tokens: int
    # Milliseconds of the traced prompts, by group of kernels.
    breakdown: dict[str, float]


@dataclass(frozen=True)
class Growth:
    """Bytes by which memory grew over a number of steps."""

    steps: int
    device_allocated: int
    device_reserved: int
    host_resident: int


@dataclass(frozen=True)
class Report:
    shape: str
    layers: int
    context: int
    kv: str
    experts: str
    device: str
    ceilings: Ceilings
    sustained: Ceilings
    load_seconds: float
    decode: list[Decode]
    # None if prefill was not measured.
    prefill: Prefill | None
    peak_bytes: int


class RankBench:
    """One engine with one rank's model. Raises ConfigError, or torch's own error, if the device is too small.

    Attributes:
        power: what bytes and operations take of the card's power; None if that is not measured.
        loads: what that follows from.
    """

    def __init__(
        self,
        measured: MeasuredModel,
        requests: Sequence[int],
        context: int = CONTEXT,
        step_tokens: int = STEP_TOKENS,
        *,
        power: bool = False,
    ) -> None:
        """context: tokens before those that are decoded; step_tokens: the most of a step; power: whether power is
        measured, which takes ten seconds.
        """
        self._measured = measured
        self._context = context
        self._most_requests = max(requests)
        self._ceilings = measure_ceilings(torch.device("cuda"))
        self._sustained = measure_ceilings(torch.device("cuda"), SUSTAINED_SECONDS)
        self._meter: PowerMeter | None = None
        self.power: PowerModel | None = None
        self.loads: list[Load] = []
        if power:
            counter = EnergyCounter()
            self._meter = PowerMeter(counter)
            self.power, self.loads = measure_power(counter)
        torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as scratch:
            self._config = config = EngineConfig(
                **measured.settings(Path(scratch)),
                max_requests=max(requests),
                graph_rows=tuple(requests),
                max_step_tokens=step_tokens,
                context_tokens=max(context, CONTEXT) + SPARE_TOKENS,
                # The bench runs each kind of step once before it measures.
                warm_up="off",
                # Memory of the host is locked while an engine is young, and there are several.
                host_blocks=0,
            )
            resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
            started = time.perf_counter()
            model = make_rank(resolved)
            torch.cuda.synchronize()
            self._load_seconds = time.perf_counter() - started
            self._backend = ModelBackend(resolved, model)
        self._model = model.config
        self._load = self._make_load(step_tokens)
        fill_pool(self._backend.state)

    def decode(self, requests: int, steps: int) -> Decode:
        """The median of `steps` steps around the contexts."""
        load = self._load
        start_steps(load, requests, self._context, steps)
        with self._meter or nullcontext():
            timed = time_steps(load, requests, steps)
        trace = trace_steps(load)
        operations = decode_operations(self._model, requests, self._context, self._backend.state.kv_pool.dtype.itemsize)
        return Decode(
            requests=requests,
            step_ms=timed.step_ms,
            floor_ms=decode_floor(operations, self._ceilings) * 1000,
            sustained_floor_ms=decode_floor(operations, self._sustained) * 1000,
            idle_share=trace.idle_share,
            breakdown={name: total / TRACED_STEPS for name, total in trace.by_group(GROUPS).items()},
            kernels=trace.by_name(),
            operations=operations,
            watts=self._meter.watts if self._meter else None,
            power_floor_ms=self.power.seconds(operations) * 1000 if self.power else None,
        )

    def prefill(self, step_tokens: int = STEP_TOKENS) -> Prefill:
        """Measure prompts of 3,500 tokens, none of them cached, in steps of no more than `step_tokens`."""
        load = self._make_load(step_tokens)
        # Run the same once before, so that compiling for these sizes is not measured.
        load.prefill_seconds(PREFILL_PROMPTS, CONTEXT)
        seconds = load.prefill_seconds(PREFILL_PROMPTS, CONTEXT)
        trace = trace_kernels(lambda: load.prefill_seconds(TRACED_PROMPTS, CONTEXT))
        return Prefill(
            tokens_per_second=PREFILL_PROMPTS * CONTEXT / seconds,
            step_tokens=step_tokens,
            breakdown={name: total / 1000 for name, total in trace.by_group(GROUPS).items()},
        )

    def _make_load(self, step_tokens: int) -> RankLoad:
        """A load for another engine of the same model. The one before has nothing left to do."""
        config = self._config.model_copy(update={"max_step_tokens": step_tokens})
        return RankLoad(Engine(config, self._backend, time.monotonic), self._backend)

    def growth(self, steps: int) -> Growth:
        """Measure growth over `steps` steps of requests that come and go, after a tenth as many steps of warm-up."""
        self._churn(steps // 10)
        before = _memory()
        self._churn(steps)
        allocated, reserved, resident = (later - earlier for later, earlier in zip(_memory(), before, strict=True))
        return Growth(steps, allocated, reserved, resident)

    def _churn(self, steps: int) -> None:
        self._load.churn(min(self._most_requests, CHURNED_REQUESTS), prompt_tokens=200, tokens=50, steps=steps)

    def report(self, decode: list[Decode], prefill: Prefill | None) -> Report:
        return Report(
            shape=self._measured.shape,
            layers=self._measured.layers,
            context=self._context,
            kv=self._measured.kv,
            experts=self._measured.experts,
            device=torch.cuda.get_device_name(),
            ceilings=self._ceilings,
            sustained=self._sustained,
            load_seconds=self._load_seconds,
            decode=decode,
            prefill=prefill,
            peak_bytes=torch.cuda.max_memory_allocated(),
        )


def _memory() -> tuple[int, int, int]:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), psutil.Process().memory_info().rss

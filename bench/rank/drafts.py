"""Decode steps with drafts against steps without: one engine after the other over the same weights."""

import dataclasses
import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.rank.acceptance import NONE_RIGHT, NextN
from bench.rank.ceilings import SUSTAINED_SECONDS, measure_ceilings
from bench.rank.draft_overhead import DraftOverhead, measure_overhead
from bench.rank.load import RankLoad, fill_pool
from bench.rank.measure import GROUPS, STEP_TOKENS
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.steps import CONTEXT, SPARE_TOKENS, TRACED_STEPS, start_steps, time_steps, trace_steps
from capacity.ceilings import Ceilings
from capacity.floor import decode_floor, decode_operations, guess_operations
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.pace.step_times import StepTimes
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve


@dataclass(frozen=True)
class Drafted:
    """Figures for one number of requests and one set of shares. Steps may differ, so that times are means."""

    requests: int
    # Drafts of a row, on average.
    drafts: float
    # The share of rows whose first draft is accepted, whose first and second are, and so on.
    acceptance: Sequence[float]
    step_ms: float
    # Tokens that a request gets in a step.
    tokens: float
    floor_ms: float
    sustained_floor_ms: float
    idle_share: float
    # Microseconds a step, by group of kernels.
    breakdown: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.requests * self.tokens / self.step_ms * 1000


class DraftBench:
    """Attributes:
    step_times: what the engine measured before it served, if it chooses the number of drafts.
    overheads: the cost of drafting itself by number of requests, with the fixed number of drafts, or with one if the
        engine chooses.
    """

    def __init__(self, measured: MeasuredModel, requests: Sequence[int]) -> None:
        device = torch.device("cuda")
        self.ceilings: Ceilings = measure_ceilings(device)
        self.sustained: Ceilings = measure_ceilings(device, SUSTAINED_SECONDS)
        torch.cuda.empty_cache()
        self._requests = requests
        self.step_times: StepTimes | None = None
        self.overheads: list[DraftOverhead] = []
        with tempfile.TemporaryDirectory() as scratch:
            self._settings = measured.settings(Path(scratch), mtp_modules=1)
            config = self._config(1)
            self._model = make_rank(resolve(config, Hardware(torch.cuda.device_count(), 0)))
            self._plain_config = dataclasses.replace(self._model.config, draft_layers=0)
            self._drafting_config = self._model.config
            self._mtp = self._model.mtp

    def without_drafts(self, steps: int) -> list[Drafted]:
        self._model.config, self._model.mtp = self._plain_config, []
        load, backend = self._start(0)
        found = [self._measure(load, backend, 0, (), requests, steps) for requests in self._requests]
        self._model.config, self._model.mtp = self._drafting_config, self._mtp
        return found

    def with_drafts(self, next_n: NextN, columns: Sequence[Sequence[float]], steps: int) -> list[Drafted]:
        load, backend = self._start(next_n)
        self.step_times = backend.step_times
        found = []
        for shares in columns:
            assert backend.state.pinned is not None
            backend.state.pinned.set(shares)
            found += [self._measure(load, backend, next_n, shares, each, steps) for each in self._requests]
        self.overheads = [self._overhead(backend, each, 1 if next_n == "auto" else next_n) for each in self._requests]
        return found

    def _overhead(self, backend: ModelBackend, requests: int, drafts: int) -> DraftOverhead:
        shape = self._plain_config, requests, CONTEXT, backend.state.kv_pool.dtype.itemsize, drafts
        floor_us = decode_floor(list(guess_operations(*shape)), self.ceilings) * 1e6
        return measure_overhead(self._model, backend.state, self._config(drafts), requests, CONTEXT, floor_us)

    def _start(self, next_n: NextN) -> tuple[RankLoad, ModelBackend]:
        # Free the memory of the engine before.
        gc.collect()
        torch.cuda.empty_cache()
        config = self._config(next_n)
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        backend = ModelBackend(resolved, self._model)
        load = RankLoad(Engine(config, backend, time.monotonic), backend)
        fill_pool(backend.state)
        return load, backend

    def _config(self, next_n: NextN) -> EngineConfig:
        return EngineConfig(
            **self._settings,
            max_requests=max(self._requests),
            graph_rows=tuple(self._requests),
            max_step_tokens=STEP_TOKENS,
            context_tokens=CONTEXT + SPARE_TOKENS,
            warm_up="off",
            # Memory of the host is locked while an engine is young.
            host_blocks=0,
            drafts=DraftsConfig(next_n=next_n, pinned_acceptance=NONE_RIGHT if next_n else ()),
        )

    def _measure(
        self, load: RankLoad, backend: ModelBackend, next_n: NextN, shares: Sequence[float], requests: int, steps: int
    ) -> Drafted:
        start_steps(load, requests, CONTEXT, steps, DraftsConfig(next_n=next_n).most, shares)
        timed = time_steps(load, requests, steps)
        trace = trace_steps(load)
        # If steps differ in their drafts, the floor is that of the mean number, rounded.
        shape = self._plain_config, requests, CONTEXT, backend.state.kv_pool.dtype.itemsize, round(timed.drafts)
        operations = [*decode_operations(*shape), *guess_operations(*shape)]
        floors = [decode_floor(operations, ceilings) * 1000 for ceilings in (self.ceilings, self.sustained)]
        breakdown = {name: total / TRACED_STEPS for name, total in trace.by_group(GROUPS).items()}
        counted = timed.drafts, shares, timed.step_ms, timed.tokens
        return Drafted(requests, *counted, floors[0], floors[1], trace.idle_share, breakdown)

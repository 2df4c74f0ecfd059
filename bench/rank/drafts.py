"""Decode steps with drafts against steps without: one engine after the other over the same weights."""

import dataclasses
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal
from unittest import mock

import torch

from bench.rank.ceilings import SUSTAINED_SECONDS, Ceilings, measure_ceilings
from bench.rank.floor import decode_floor, decode_operations, guess_operations
from bench.rank.kernel_trace import trace_kernels
from bench.rank.load import RankLoad, fill_pool
from bench.rank.measure import CONTEXT, GROUPS, SPARE_TOKENS, STEP_TOKENS, TRACED_STEPS, WARM_STEPS
from bench.rank.model import make_rank, write_shape
from engine.config import DraftsConfig, EngineConfig, Hardware, resolve
from engine.engine import Engine
from engine.model.decode_inputs import NO_TOKEN
from engine.runner.backend import ModelBackend
from engine.step_times import StepTimes

NextN = int | Literal["auto"]


@dataclass(frozen=True)
class Drafted:
    """Figures of one number of requests, and of one set of shares. Steps may differ, so time is their mean."""

    requests: int
    # Those of a row, on average.
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


class InjectedAcceptance:
    """Decides by chance, on the device, how many drafts are right: random weights guess nothing.

    Drafts count as right from the left, as `count_accepted` of the engine counts them, which this stands in for.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._shares = torch.zeros(most, device=device)

    def set(self, shares: Sequence[float]) -> None:
        """Captured graphs read them too. Drafts behind those with a share are wrong."""
        self._shares.zero_()
        self._shares[: len(shares)] = torch.tensor(shares[: len(self._shares)], device=self._shares.device)

    def count_accepted(self, drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        points = torch.rand(len(drawn), 1, device=drawn.device)
        right = (points < self._shares[: drafts.shape[1]]).sum(1)
        return torch.minimum(right, (drafts != NO_TOKEN).sum(1))

    @contextmanager
    def injected(self) -> Iterator[None]:
        with (
            mock.patch("engine.runner.draft_graphs.count_accepted", self.count_accepted),
            mock.patch("engine.runner.draft_pass.count_accepted", self.count_accepted),
        ):
            yield


class DraftBench:
    """Attributes:
    step_times: what the engine measured before it served, if it chooses the depth.
    """

    def __init__(self, shape: str, layers: int, kv: str, experts: str, requests: Sequence[int]) -> None:
        device = torch.device("cuda")
        self.ceilings: Ceilings = measure_ceilings(device)
        self.sustained: Ceilings = measure_ceilings(device, SUSTAINED_SECONDS)
        torch.cuda.empty_cache()
        self._requests, self._kv = requests, kv
        self.step_times: StepTimes | None = None
        with tempfile.TemporaryDirectory() as scratch:
            self._directory = write_shape(Path(scratch), shape, layers, experts, mtp_modules=1)
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
        most = DraftsConfig(next_n=next_n).most
        acceptance = InjectedAcceptance(most, self._model.device)
        with acceptance.injected():
            load, backend = self._start(next_n)
            self.step_times = backend.step_times
            found = []
            for shares in columns:
                acceptance.set(shares)
                found += [self._measure(load, backend, next_n, shares, each, steps) for each in self._requests]
            return found

    def _start(self, next_n: NextN) -> tuple[RankLoad, ModelBackend]:
        # Memory that the engine before held.
        gc.collect()
        torch.cuda.empty_cache()
        config = self._config(next_n)
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        backend = ModelBackend(resolved, self._model)
        load = RankLoad(Engine(config, backend, time.monotonic), backend)
        fill_pool(backend.state.kv_pool)
        return load, backend

    def _config(self, next_n: NextN) -> EngineConfig:
        return EngineConfig(
            model_dir=self._directory,
            random_weights=True,
            kv_dtype="float8_e4m3fn" if self._kv == "fp8" else "auto",
            max_requests=max(self._requests),
            graph_rows=tuple(self._requests),
            max_step_tokens=STEP_TOKENS,
            context_tokens=CONTEXT + SPARE_TOKENS,
            warm_up="off",
            drafts=DraftsConfig(next_n=next_n),
        )

    def _measure(
        self, load: RankLoad, backend: ModelBackend, next_n: NextN, shares: Sequence[float], requests: int, steps: int
    ) -> Drafted:
        most = DraftsConfig(next_n=next_n).most
        expected = 1 + sum(shares[:most])
        all_steps = WARM_STEPS + steps + TRACED_STEPS + 4
        start = CONTEXT - int((WARM_STEPS + steps // 2) * expected)
        load.start_decoding(requests, start, min(all_steps * (1 + most), CONTEXT + SPARE_TOKENS - start - 1))
        load.decode_seconds(WARM_STEPS)
        before, verified = load.tokens, load.verified
        seconds = load.decode_seconds(steps)
        tokens = (load.tokens - before) / steps / requests
        drafts = (load.verified - verified) / steps / requests
        trace = trace_kernels(lambda: load.decode_seconds(TRACED_STEPS))
        load.drain()
        # Steps of unequal depths have the floor of the nearest one.
        shape = self._plain_config, requests, CONTEXT, backend.state.kv_pool.dtype.itemsize, round(drafts)
        operations = [*decode_operations(*shape), *guess_operations(*shape)]
        floors = [decode_floor(operations, ceilings) * 1000 for ceilings in (self.ceilings, self.sustained)]
        breakdown = {name: total / TRACED_STEPS for name, total in trace.by_group(GROUPS).items()}
        step_ms = mean(seconds) * 1000
        return Drafted(requests, drafts, shares, step_ms, tokens, floors[0], floors[1], trace.idle_share, breakdown)

"""What each rank of a node measures: the serving engine with a share of DeepSeek-R1 and random weights."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from bench.kernels.timing import time_graph
from bench.node.agreement_clock import AgreementClock
from bench.node.rows import Case, Row, append_rows
from bench.node.wire import guess_wire_bytes, wire_bytes
from bench.rank.acceptance import NONE_RIGHT, NextN, Shares
from bench.rank.ceilings import SUSTAINED_SECONDS, measure_ceilings
from bench.rank.following import follow
from bench.rank.load import RankLoad, fill_pool
from bench.rank.measure import GROUPS
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.steps import CONTEXT, SPARE_TOKENS, TRACED_STEPS, TimedSteps, start_steps, time_steps, trace_steps
from capacity.ceilings import Ceilings
from capacity.floor import decode_floor, decode_operations, guess_operations
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.exchange.interface import RankExchange
from engine.exchange.peer import PeerExchange
from engine.model.activations import Normalized, quantized_form
from engine.model.config import ModelConfig
from engine.model.model import Model
from engine.model.moe import MixtureOfExperts
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Group, Layout
from engine.parallel.peers import Peers
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, ResolvedEngineConfig, resolve
from kernels.act_quant import quantize
from kernels.moe_permute import combine

SHAPE = "r1"
# How many full steps of prompts are measured.
PREFILL_STEPS = 4
# Kernels of the exchange. Their times include the waits for other ranks.
NODE_GROUPS = {"exchange": r"^(gather|words|slots|sum_norm|all_sum_norm|norm_gather)_"} | GROUPS
# How many sums over the ranks follow one another when they are timed.
TIMED_SUMS = 40


@dataclass(frozen=True)
class Options:
    layout: Layout
    model: MeasuredModel
    # Drafts of a row; 0 for none.
    next_n: NextN
    steps: int
    # Most tokens of a step with prompts.
    step_tokens: int
    # Bytes a second between two GPUs.
    wire_rate: float
    # A file that gets one line for each case.
    out: Path | None

    @property
    def most_drafts(self) -> int:
        return DraftsConfig(next_n=self.next_n).most

    @property
    def row_tokens(self) -> int:
        """Tokens of a request in a step; if the engine chooses the number of drafts, the least."""
        return 1 + (self.next_n if isinstance(self.next_n, int) else 0)

    def cases(self, requests: Sequence[int], acceptance: Sequence[Shares]) -> list[Case]:
        """A case for each number of requests; with drafts, one for each number with each of the shares."""
        name = f"tp{self.layout.tp} dp{self.layout.dp} ep{self.layout.ep}"
        columns = [shares[: self.most_drafts] for shares in acceptance] if self.next_n else [()]
        what = name, self.model.layers, self.model.experts, self.model.kv
        return [Case(*what, count, self.next_n, shares) for shares in columns for count in requests]


@dataclass(frozen=True)
class PartSeconds:
    """Seconds that parts of a step take outside of one."""

    # One layer's routed experts, with their exchanges.
    routed: float
    # All sums over the ranks of a TP group, one after the other.
    sums: float


def measure(options: Options, cases: Sequence[Case], exchange: PeerExchange) -> list[Row]:
    """Run by all ranks at once. A rank that follows another measures nothing."""
    ceilings = [measure_ceilings(torch.device("cuda"), seconds) for seconds in (0.0, SUSTAINED_SECONDS)]
    torch.cuda.empty_cache()
    rows = {case.requests: case.requests * options.row_tokens for case in cases}
    with tempfile.TemporaryDirectory() as scratch:
        resolved = resolve_for(Path(scratch), options, sorted(rows), torch.cuda.device_count())
        model = make_rank(resolved, exchange)
        alone = {requests: _alone(model, exchange, count) for requests, count in rows.items()}
        return NodeBench(options, resolved, model, exchange, exchange.peers).measure(cases, ceilings, alone)


class NodeBench:
    """One rank of those that measure together."""

    def __init__(
        self,
        options: Options,
        resolved: ResolvedEngineConfig,
        model: Model,
        exchange: RankExchange,
        peers: Peers,
    ) -> None:
        self._options, self._config, self._model = options, resolved.config, model.config
        self._backend = ModelBackend(resolved, model, exchange)
        fill_pool(self._backend.state)
        self._exchange, self._peers = exchange, peers
        self._clock = AgreementClock(peers)
        self._prompt_rate: float | None = None

    def measure(self, cases: Sequence[Case], ceilings: Sequence[Ceilings], alone: dict[int, PartSeconds]) -> list[Row]:
        """cases: cases with equal shares must follow one another; alone: by the number of requests."""
        rows = []
        for shares, together in groupby(cases, key=lambda case: case.acceptance):
            # Each rank sets the shares after all have stopped and before any begins again.
            if self._backend.state.pinned is not None:
                self._backend.state.pinned.set(shares)
            if not self._exchange.place.leads:
                follow(self._backend, self._clock.agreement, self._peers)
                continue
            rows += self._lead(list(together), ceilings, alone)
        return rows

    def _lead(self, cases: list[Case], ceilings: Sequence[Ceilings], alone: dict[int, PartSeconds]) -> list[Row]:
        engine = Engine(self._config, self._backend, time.monotonic, agreement=self._clock.agreement)
        load = RankLoad(engine, self._backend)
        if self._prompt_rate is None:
            self._prompt_rate = _prompt_rate(self._options, load)
        rows = []
        for case in cases:
            rows.append(self._row(case, load, ceilings, alone[case.requests], self._prompt_rate))
            if self._options.out is not None and self._exchange.place.rank == 0:
                append_rows(self._options.out, rows[-1:])
        engine.stop()
        while not engine.stopped:
            engine.step()
        return rows

    def _row(
        self, case: Case, load: RankLoad, ceilings: Sequence[Ceilings], alone: PartSeconds, prompt_rate: float
    ) -> Row:
        options, requests = self._options, case.requests
        start_steps(load, requests, CONTEXT, options.steps, options.most_drafts, case.acceptance)
        self._clock.restart()
        timed = time_steps(load, requests, options.steps)
        agreement_seconds = self._clock.mean_seconds()
        trace = trace_steps(load)
        breakdown = {name: total / TRACED_STEPS for name, total in trace.by_group(NODE_GROUPS).items()}
        floors, wire_ms = _floors(self._model, options, requests, timed, ceilings)
        mixtures = sum(not self._model.is_dense(layer) for layer in range(options.model.layers)) + timed.drafts
        return Row(
            case=case,
            step_ms=timed.step_ms,
            floor_ms=floors[0],
            sustained_floor_ms=floors[1],
            # Few rows are limited by the way to the other ranks and back, not by bytes.
            wire_ms=max(wire_ms, alone.sums * 1000),
            idle_share=trace.idle_share,
            exchange_us=breakdown.get("exchange", 0.0) / mixtures,
            routed_us=alone.routed * 1e6,
            agreement_us=agreement_seconds * 1e6,
            prompt_rate=prompt_rate,
            breakdown=breakdown,
            tokens=timed.tokens,
            drafts=timed.drafts,
        )


def _floors(
    config: ModelConfig, options: Options, requests: int, timed: TimedSteps, ceilings: Sequence[Ceilings]
) -> tuple[list[float], float]:
    """Milliseconds of the floor at each of the ceilings, and of the wire. If steps differ in depth, both are those of
    the mean depth, rounded.
    """
    drafts, layout = round(timed.drafts), options.layout
    shape = config, requests, CONTEXT, 1 if options.model.kv == "fp8" else 2, drafts, layout
    operations = [*decode_operations(*shape), *guess_operations(*shape)]
    received = wire_bytes(config, layout, requests * (1 + drafts)) + guess_wire_bytes(config, layout, requests, drafts)
    return [decode_floor(operations, each) * 1000 for each in ceilings], received / options.wire_rate * 1000


def resolve_for(scratch: Path, options: Options, requests: Sequence[int], gpus: int) -> ResolvedEngineConfig:
    """The configuration of a rank whose steps have these numbers of requests, on a host with this many GPUs."""
    layout = options.layout
    config = EngineConfig(
        **options.model.settings(scratch, mtp_modules=min(options.most_drafts, 1)),
        max_requests=max(requests),
        graph_rows=tuple(requests),
        max_step_tokens=options.step_tokens,
        context_tokens=CONTEXT + SPARE_TOKENS,
        parallel=ParallelConfig(tp=layout.tp, dp=layout.dp, ep=layout.ep),
        # The bench runs each kind of step once before it measures.
        warm_up="off",
        # Page-locking would go on while the first steps are timed.
        host_blocks=0,
        drafts=DraftsConfig(next_n=options.next_n, pinned_acceptance=NONE_RIGHT if options.next_n else ()),
    )
    return resolve(config, Hardware(gpus, 0))


def _alone(model: Model, exchange: RankExchange, rows: int) -> PartSeconds:
    return PartSeconds(_routed_seconds(model, rows), _sums_seconds(model, exchange, rows))


def _routed_seconds(model: Model, rows: int) -> float:
    """Time of one layer: gate, dispatch, this rank's experts, their sums, and the way back. A TP group divides its
    rows among its ranks. If it has few, every rank has all of them: then there is no dispatch, and the sums go back
    only with the next norm.
    """
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MixtureOfExperts)]
    everywhere, real = model.group.has_everywhere(rows), torch.ones(rows, 1, dtype=torch.bool, device="cuda")
    counted = (real if everywhere else model.group.own(real)).squeeze(1)
    plain = torch.randn(len(counted), model.config.hidden_size, device="cuda").bfloat16()
    form = quantized_form(mixtures[0].input_forms)
    hidden = Normalized(plain, None if form is None else quantize(plain, powers=form.powers))

    def call(mixture: MixtureOfExperts) -> object:
        parts = combine(mixture.routed(hidden, counted, everywhere=everywhere))
        return parts if everywhere else model.expert_group.sum_parts(parts)

    with torch.inference_mode():
        return time_graph([lambda mixture=mixture: call(mixture) for mixture in mixtures])  # type: ignore[misc]


def _sums_seconds(model: Model, exchange: RankExchange, rows: int) -> float:
    """Time of two sums over the ranks in each layer, one after the other in a graph, if all ranks have all rows; else
    0, for then rows travel otherwise.
    """
    if not model.group.has_everywhere(rows):
        return 0.0
    values = torch.randn(rows, model.config.hidden_size, device="cuda").bfloat16()
    with torch.inference_mode():
        return 2 * len(model.layers) * time_graph([lambda: exchange.all_reduce(values, Group.TP)] * TIMED_SUMS)


def _prompt_rate(options: Options, load: RankLoad) -> float:
    prompts = PREFILL_STEPS * options.step_tokens // CONTEXT
    # The first run compiles the kernels of full steps.
    load.prefill_seconds(prompts, CONTEXT)
    return prompts * CONTEXT / load.prefill_seconds(prompts, CONTEXT)

"""What each rank of a node does: the engine that serves, with a share of DeepSeek-R1 and random weights."""

import json
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from bench.kernels.timing import time_graph
from bench.node.agreement_clock import AgreementClock
from bench.node.wire import wire_bytes
from bench.rank.ceilings import SUSTAINED_SECONDS, Ceilings, measure_ceilings
from bench.rank.floor import decode_floor, decode_operations
from bench.rank.kernel_trace import trace_kernels
from bench.rank.load import RankLoad, fill_pool
from bench.rank.measure import CONTEXT, GROUPS, SPARE_TOKENS, TRACED_STEPS, WARM_STEPS
from bench.rank.model import make_rank, write_shape
from engine.agreement import Agreement
from engine.config import EngineConfig, Hardware, ResolvedEngineConfig, resolve
from engine.engine import Engine
from engine.exchange.peer import PeerExchange
from engine.model.activations import InputForm
from engine.model.model import Model
from engine.model.moe import MixtureOfExperts
from engine.model.normalized import Normalized
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.protocol.frames import FrameEncoder
from engine.protocol.messages import Stop
from engine.protocol.pulse import Pulse
from engine.rank.follower import FollowerLoop
from engine.rank.heartbeat import Heartbeat
from engine.rank.link import RankLink
from engine.runner.backend import ModelBackend
from kernels.act_quant import quantize
from kernels.moe_permute import combine

SHAPE = "r1"
# Full steps of prompts.
PREFILL_STEPS = 4
# Kernels of the exchange, which wait for the other ranks' too.
NODE_GROUPS = {"exchange": r"^(gather|words|slots|sum_norm|all_sum_norm|norm_gather)_"} | GROUPS
# A heartbeat that nobody reads allows a step so long.
STEP_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """What identifies a measurement. `requests` are those of a rank that batches."""

    layout: str
    layers: int
    experts: str
    kv: str
    requests: int


@dataclass(frozen=True)
class Row:
    case: Case
    step_ms: float
    # The floor of bytes and FLOPs at the rates of a burst, at those that a card keeps up, and the wire's time.
    floor_ms: float
    sustained_floor_ms: float
    wire_ms: float
    idle_share: float
    # A layer with experts takes so long in kernels of the exchange, with their waits, and in routed experts alone.
    exchange_us: float
    routed_us: float
    # The host takes so long to agree on a step with the other ranks, without the wait for them.
    agreement_us: float
    # Tokens a second of prompts of 3,500 tokens that this rank computes while all others compute as many.
    prompt_rate: float
    # Microseconds of a step by group of kernels.
    breakdown: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.step_ms / (self.floor_ms + self.wire_ms)

    @property
    def sustained_ratio(self) -> float:
        return self.step_ms / (self.sustained_floor_ms + self.wire_ms)

    def served(self, output_tokens: int) -> tuple[float, float]:
        """Milliseconds a token, and requests a minute of a rank, if its place is given to a new prompt as soon as a
        request has its output_tokens: a step is a decode step, and its share of the prompts that must come meanwhile.
        """
        prompt_ms = CONTEXT / self.prompt_rate * 1000
        token_ms = self.step_ms + self.case.requests * prompt_ms / output_tokens
        return token_ms, self.case.requests / (output_tokens * token_ms) * 60_000


@dataclass(frozen=True)
class Options:
    layout: Layout
    layers: int
    experts: str
    kv: str
    # Those to be measured.
    requests: tuple[int, ...]
    steps: int
    # Most tokens of a step with prompts.
    step_tokens: int
    # Bytes a second between two GPUs.
    wire_rate: float
    # Gets a line a case.
    out: Path | None


def measure(options: Options, exchange: PeerExchange) -> list[Row]:
    """On each rank at once; a rank that follows another measures nothing."""
    ceilings = [measure_ceilings(torch.device("cuda"), seconds) for seconds in (0.0, SUSTAINED_SECONDS)]
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as scratch:
        resolved = _resolved(Path(scratch), options)
        model = make_rank(resolved, exchange)
        routed = {requests: _routed_seconds(model, requests) for requests in options.requests}
        backend = ModelBackend(resolved, model, exchange)
    fill_pool(backend.state.kv_pool)
    clock = AgreementClock(exchange.peers)
    if not exchange.place.leads:
        _follow(backend, clock.agreement, exchange)
        return []
    engine = Engine(resolved.config, backend, time.monotonic, agreement=clock.agreement)
    load = RankLoad(engine, backend)
    rows = []
    prompt_rate = _prompt_rate(options, load)
    for requests in options.requests:
        rows.append(_decode(options, requests, model, load, clock, ceilings, routed[requests], prompt_rate))
        if options.out is not None and exchange.place.rank == 0:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
    engine.stop()
    while not engine.stopped:
        engine.step()
    return rows


def _resolved(scratch: Path, options: Options) -> ResolvedEngineConfig:
    layout = options.layout
    config = EngineConfig(
        model_dir=write_shape(scratch, SHAPE, options.layers, options.experts),
        random_weights=True,
        kv_dtype="float8_e4m3fn" if options.kv == "fp8" else "auto",
        max_requests=max(options.requests),
        graph_rows=options.requests,
        max_step_tokens=options.step_tokens,
        context_tokens=CONTEXT + SPARE_TOKENS,
        parallel=ParallelConfig(tp=layout.tp, dp=layout.dp, ep=layout.ep),
        # Run once before it is measured.
        warm_up="off",
    )
    return resolve(config, Hardware(torch.cuda.device_count(), 0))


def _routed_seconds(model: Model, requests: int) -> float:
    """Of one layer: gate, dispatch, this rank's experts, their sums, and the way back. A TP group divides its rows, or
    has few of them everywhere: then there is no dispatch, and no way back but with the next norm.
    """
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MixtureOfExperts)]
    everywhere, real = model.group.has_everywhere(requests), torch.ones(requests, 1, dtype=torch.bool, device="cuda")
    counted = (real if everywhere else model.group.own(real)).squeeze(1)
    plain = torch.randn(len(counted), model.config.hidden_size, device="cuda").bfloat16()
    quantized = InputForm.FP8_GROUPS in mixtures[0].input_forms
    hidden = Normalized(plain, quantize(plain) if quantized else None)

    def call(mixture: MixtureOfExperts) -> object:
        parts = combine(mixture.routed(hidden, counted, everywhere=everywhere))
        return parts if everywhere else model.expert_group.begin_sum(parts).finish()

    with torch.inference_mode():
        return time_graph([lambda mixture=mixture: call(mixture) for mixture in mixtures])  # type: ignore[misc]


def _prompt_rate(options: Options, load: RankLoad) -> float:
    load.prefill_seconds(1, CONTEXT)
    prompts = PREFILL_STEPS * options.step_tokens // CONTEXT
    return prompts * CONTEXT / load.prefill_seconds(prompts, CONTEXT)


def _decode(
    options: Options,
    requests: int,
    model: Model,
    load: RankLoad,
    clock: AgreementClock,
    ceilings: list[Ceilings],
    routed_seconds: float,
    prompt_rate: float,
) -> Row:
    """The median of steps around contexts of 3,500 tokens."""
    layout, config = options.layout, model.config
    load.start_decoding(
        requests, CONTEXT - WARM_STEPS - options.steps // 2, WARM_STEPS + options.steps + TRACED_STEPS + 4
    )
    load.decode_seconds(WARM_STEPS)
    clock.restart()
    seconds = median(load.decode_seconds(options.steps))
    agreement_seconds = clock.mean_seconds()
    trace = trace_kernels(lambda: load.decode_seconds(TRACED_STEPS))
    load.drain()
    breakdown = {name: total / TRACED_STEPS for name, total in trace.by_group(NODE_GROUPS).items()}
    mixtures = sum(not config.is_dense(layer) for layer in range(options.layers))
    operations = decode_operations(config, requests, CONTEXT, 1 if options.kv == "fp8" else 2, layout=layout)
    burst, sustained = (decode_floor(operations, each) * 1000 for each in ceilings)
    return Row(
        case=case_of(options, requests),
        step_ms=seconds * 1000,
        floor_ms=burst,
        sustained_floor_ms=sustained,
        wire_ms=wire_bytes(config, layout, requests) / options.wire_rate * 1000,
        idle_share=trace.idle_share,
        exchange_us=breakdown.get("exchange", 0.0) / mixtures,
        routed_us=routed_seconds * 1e6,
        agreement_us=agreement_seconds * 1e6,
        prompt_rate=prompt_rate,
        breakdown=breakdown,
    )


def case_of(options: Options, requests: int) -> Case:
    layout = options.layout
    name = f"tp{layout.tp} dp{layout.dp} ep{layout.ep}"
    return Case(name, options.layers, options.experts, options.kv, requests)


def _follow(backend: ModelBackend, agreement: Agreement, exchange: PeerExchange) -> None:
    """Until the first rank has stopped."""
    ours, theirs = socket.socketpair()
    pulse, _ = Pulse.create()
    with ours, theirs:
        ours.sendall(FrameEncoder().encode(Stop()))
        link = RankLink(theirs, exchange.peers.wakeup)
        FollowerLoop(link, backend, agreement, Heartbeat(pulse, None, STEP_SECONDS)).run()

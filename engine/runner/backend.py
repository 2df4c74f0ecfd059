"""The model as a backend: weights, KV pool, and the execution of one step's batch."""

import logging
from collections.abc import Sequence

import msgspec
import torch

from engine.balance.config import BalanceConfig
from engine.balance.report import BalanceReport
from engine.batch import Batch, Launched, StepShape, execute, shape_of
from engine.config import EngineConfig, ResolvedEngineConfig
from engine.drafts.depth_times import measure_depths
from engine.drafts.draft_pass import EagerPass
from engine.drafts.drafting import Drafter, DraftingStep
from engine.drafts.graphs import DraftGraphs
from engine.drafts.relaxation import RelaxationRule
from engine.exchange.alone import Alone
from engine.exchange.interface import RankExchange
from engine.memory.pool_plan import device_state, plan_pool
from engine.model.inputs import build_context, last_tokens
from engine.model.model import Model
from engine.pace.step_times import StepTimes
from engine.requests.sparse_measure import SparseMeasure
from engine.requests.thinking import read_think_tokens
from engine.runner import step_parts
from engine.runner.balancer import Balancer
from engine.runner.captured import (
    capture_decoding,
    capture_drafting,
    capture_prompts,
    captured_prompts,
    graph_sizes,
)
from engine.runner.following import Following
from engine.runner.graphs import DecodeGraphs
from engine.runner.launched_step import LaunchedStep
from engine.runner.micro_batches import MicroBatches
from engine.runner.namespace import kv_namespace
from engine.runner.prompt_graphs import PromptGraphs
from engine.runner.prompt_logits import PendingPromptLogprobs, wanted
from engine.runner.sampler import Sampler
from engine.runner.spreading import Spreading
from engine.runner.step_events import StepEvents
from engine.runner.step_sizes import padded_size, step_sizes
from engine.runner.two_batch_times import choose_two_batch
from engine.runner.warm_up import StepKind, kind_of, warm_up_steps
from engine.weights.making import make_model
from kernels.host_copy import to_indices
from mesh.observe import span
from mesh.progress import ProgressLog
from mesh.start_times import StartTimes
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory

_log = logging.getLogger("deepmesh.engine")


class ModelBackend:
    """An `engine.batch.Backend` over a checkpoint, or with random weights.

    Raises CheckpointError if the checkpoint cannot be served, ConfigError if its KV pool does not fit.
    """

    def __init__(
        self,
        resolved: ResolvedEngineConfig,
        model: Model | None = None,
        exchange: RankExchange | None = None,
        times: StartTimes | None = None,
        warm: set[StepKind] | None = None,
    ) -> None:
        """model: by default the one that `resolved` describes; exchange: with the worker's other ranks, if there are
        any. `times` is told what each phase took. warm: kinds of steps that earlier backends of this process ran with
        this model; this one adds its own.
        """
        times = times or StartTimes()
        config = resolved.config
        assert config.model_dir is not None
        if config.rank_threads is not None:
            torch.set_num_threads(config.rank_threads)
        self.asynchronous = resolved.device == "cuda"
        self.device_name = torch.cuda.get_device_name() if self.asynchronous else "CPU"
        self._exchange = exchange or Alone()
        self._model = model or make_model(resolved, exchange)
        # All ranks wait for one another here, so that no device waits for a rank that still loads.
        self._model.expert_group.meet()
        times.mark("weights")
        model_config = self._model.config
        self._pool = plan_pool(self._model, resolved)
        self.block_bytes = self._pool.block_bytes
        self.total_blocks, self.context_tokens = self._pool.total_blocks, self._pool.context_tokens
        self.state = device_state(
            self._model, resolved, self.total_blocks + self._pool.foreign_blocks, self.context_tokens
        )
        self._following = Following(exchange, self.state.kv_pool) if exchange and self._model.group.divides else None
        self._sampler = Sampler(config.max_requests, model_config.vocab_size, self._model.device, self._model.group)
        self.draft_layers = model_config.draft_layers
        self.think_tokens = read_think_tokens(config.model_dir) if _relaxes(config) else None
        rule = None
        if self.think_tokens is not None:
            rule = RelaxationRule(self.think_tokens, config.drafts.top_n, config.drafts.delta)
        self._drafter = Drafter(self._model, self.state, self._sampler, rule)
        # The sizes to which steps are padded; None on a CPU, where a new size costs nothing.
        self._sizes = None
        if self.asynchronous:
            most = min(config.max_step_tokens, config.max_requests * self.context_tokens)
            self._sizes = step_sizes(most, captured_prompts(resolved))
        times.mark("memory")
        two_batch = choose_two_batch(self._model, self.state, resolved, self.context_tokens, self._size)
        self._balancer: Balancer | None = None
        times.mark("micro-batches")
        self._graphs: DecodeGraphs | None = None
        self._draft_graphs: DraftGraphs | None = None
        prompt_graphs: PromptGraphs | None = None
        if resolved.decode_graphs:
            with torch.inference_mode():
                prompt_graphs = capture_prompts(self._model, self.state, resolved, self._sizes or ())
                given = graph_sizes(config), self.context_tokens, two_batch
                if self.draft_layers:
                    self._draft_graphs = capture_drafting(self._model, self.state, config, *given)
                else:
                    self._graphs = capture_decoding(self._model, self.state, *given)
        self._batches = MicroBatches(two_batch, self._size, self._spreading(config, exchange), prompt_graphs)
        times.mark("graphs")
        self.model = config.model_name or config.model_dir.resolve().name
        self.vocabulary_size = model_config.vocab_size
        self.eos_token_ids = model_config.eos_token_ids
        self.namespace = kv_namespace(model_config, resolved, self.state.kv_scale)
        times.mark("fingerprint")
        if self._sizes is not None and resolved.warm_up:
            self._warm_up(self._sizes, config, set() if warm is None else warm)
        self.step_times = self._measured_depths(config) if config.drafts.next_n == "auto" else None
        times.mark("warm-up")
        # Made after all steps that no request asked for, so that their choices of experts do not count.
        self._balancer = _make_balancer(self._model, exchange, config.settled_balance)
        _log.info("model ready", extra={"fields": _summary(resolved, self.device_name, self.total_blocks)})

    @property
    def weights(self) -> Model:
        """The model, which took the longest to load: a later backend may take it when this one is gone."""
        return self._model

    def kv_memory(self) -> KvMemory:
        pool = self.state.kv_pool
        if pool.is_cuda:
            # Imported only here: it needs CUDA's bindings.
            from engine.runner.device_memory import DeviceMemory

            memory: KvMemory = DeviceMemory(pool)
        else:
            memory = HostMemory(pool.view(torch.uint8).numpy().reshape(*pool.shape[:2], -1))
        return memory if self._following is None else self._following.watched(memory)

    @torch.inference_mode()
    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        """See engine.batch.Backend."""
        first = self._model.config.num_hidden_layers
        # Viewed as bytes, because not every operation takes one-byte floats.
        drafts = self.state.kv_pool[first:].view(torch.uint8)
        drafts.index_fill_(1, self._indices(block_ids), 0)
        if self._following is not None:
            self._following.wrote(first, self.draft_layers, block_ids)

    @torch.inference_mode()
    def launch(self, batch: Batch, shape: StepShape) -> Launched:
        """Queue the batch's tokens and the writes of their KV; without rows, only padding."""
        if self._balancer is not None:
            self._balancer.before_step()
        if self._following is not None:
            batch = self._following.next_batch(batch)
        rows = batch.rows
        events = StepEvents(batch.on_layers, self._exchange.check) if self.asynchronous else None
        if self.draft_layers:
            on_layers = batch.on_layers if events is None else events.layer_hook
            if self._draft_graphs is not None and self._draft_graphs.fit(shape):
                return DraftingStep(self._drafter, rows, self._draft_graphs.run(rows, shape), None, events)
            layers = EagerPass(self._model, self.state, rows, shape, self._batches, on_layers)
            prompts = PendingPromptLogprobs(rows, layers.hidden, self._model.logits) if wanted(rows) else None
            return DraftingStep(self._drafter, rows, layers, on_layers, events, prompts)
        prompts = None
        drawing = [index for index, row in enumerate(rows) if row.sampling is not None]
        if self._graphs is not None and self._graphs.fit(shape):
            logits = self._graphs.run(rows, shape)
            if len(drawing) < len(rows):
                logits = logits[self._indices(drawing)]
        else:
            on_layers = batch.on_layers if events is None else events.layer_hook
            parts = self._batches.of(rows, shape)
            contexts = [
                part.context(build_context(self._model.config, part.rows, self.state, part.size)) for part in parts
            ]
            if wanted(rows) or parts[0].spread is not None or self._batches.captured(contexts) is not None:
                hidden = self._batches.hidden_states(self._model, parts, contexts, on_layers)
                if wanted(rows):
                    prompts = PendingPromptLogprobs(rows, hidden, self._model.logits)
                logits = self._model.logits(hidden[self._indices(last_tokens(rows))])
            else:
                logits = step_parts.logits(self._model, contexts, on_layers)
        return LaunchedStep(rows, drawing, logits, self.state, self._sampler, events, prompts)

    @property
    def captured_rows(self) -> int:
        graphs = self._draft_graphs if self.draft_layers else self._graphs
        return 0 if graphs is None else graphs.most_rows

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        meter = self.state.sparse_meter
        return () if meter is None else meter.drain()

    @property
    def balance(self) -> BalanceReport | None:
        return None if self._balancer is None else self._balancer.report

    def _captures(self, shape: StepShape) -> bool:
        """Whether a step of this shape runs as a captured graph."""
        graphs = self._draft_graphs if self.draft_layers else self._graphs
        return graphs is not None and graphs.fit(shape)

    def _size(self, tokens: int) -> int:
        """The number of tokens to which a step is padded."""
        # A draft layer may compute more tokens than a step has, one of each new prompt.
        if self._sizes is None or tokens > self._sizes[-1]:
            return tokens
        return padded_size(tokens, self._sizes)

    def _warm_up(self, sizes: Sequence[int], config: EngineConfig, warm: set[StepKind]) -> None:
        drafts, sparse = config.drafts.most, config.sparse_prefill.offered
        dtypes = self.state.kv_pool.dtype, self.state.quantized_prompts
        with span("engine.warm_up"):
            block = self.state.padding_block
            steps = list(warm_up_steps(sizes, self.context_tokens, config.max_requests, block, drafts, sparse))
            progress = ProgressLog("warming up: compiling what steps need", len(steps))
            for rows in steps:
                shape = msgspec.structs.replace(shape_of(rows), drafts=drafts)
                kind = (*dtypes, *kind_of(rows, self._size(shape.tokens), self._captures(shape)))
                if kind not in warm:
                    execute(self, Batch(0, rows), shape)
                    warm.add(kind)
                progress.advance()
            for decode_only in (True, False):
                execute(self, Batch(0, ()), StepShape(sizes[0], decode_only, drafts=drafts))

    def _spreading(self, config: EngineConfig, exchange: RankExchange | None) -> Spreading | None:
        count = self._pool.foreign_blocks
        fewest = config.parallel.divided_tokens
        if not count or exchange is None or fewest is None:
            return None
        blocks = range(self.total_blocks, self.total_blocks + count)
        return Spreading(exchange, self.state, self._model.config.num_hidden_layers, blocks, fewest)

    def _measured_depths(self, config: EngineConfig) -> StepTimes:
        with span("engine.measure_drafts"):
            return measure_depths(self, config.max_requests, config.drafts.most, self.state.padding_block)

    def _indices(self, rows: Sequence[int]) -> torch.Tensor:
        return to_indices(rows, self.state.device)


def _make_balancer(model: Model, exchange: RankExchange | None, config: BalanceConfig) -> Balancer | None:
    if exchange is None or config.interval_steps is None:
        return None
    layers = model.balanced_layers()
    return Balancer(layers, exchange, config) if layers else None


def _relaxes(config: EngineConfig) -> bool:
    return config.drafts.most > 0 and config.drafts.acceptance == "relaxed"


def _summary(resolved: ResolvedEngineConfig, device: str, blocks: int) -> dict[str, object]:
    """What an operator wants to know of a worker that starts."""
    return {"device": device, "dtype": resolved.dtype, "kv_dtype": resolved.kv_dtype, "kv_blocks": blocks}

"""The model as a backend: weights, KV pool, and the execution of one step's batch."""

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from engine.backend import Launched
from engine.balance.report import BalanceReport
from engine.batch import Batch
from engine.config import EngineConfig
from engine.drafts.draft_steps import DraftSteps
from engine.drafts.drafting import Drafter
from engine.drafts.relaxation import RelaxationRule
from engine.exchange.alone import Alone
from engine.exchange.interface import RankExchange
from engine.memory.free_memory import leave_to_driver, may_keep_all
from engine.memory.memory_plan import transfer_bytes
from engine.memory.pool_check import Serving, lacking_bytes, settle_pool
from engine.memory.pool_plan import PoolPlan, device_state, longest_context, plan_pool
from engine.memory.room import host_slots
from engine.model.config import read_model_config
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.moves.host_slots import HostSlots, PlainSlots
from engine.protocol.messages import SparseMeasure
from engine.requests.thinking import read_think_tokens
from engine.runner.balancer import Balancer, balancer_of
from engine.runner.capture import CudaCapture
from engine.runner.cuda_sources import compile_sources
from engine.runner.first_runs import can_run_at_once, compiling_draws, run_first
from engine.runner.following import Following
from engine.runner.graph_sizes import graph_sizes
from engine.runner.kept_times import known_times, times_file
from engine.runner.launched_step import StepEvents
from engine.runner.micro_batches import MicroBatches
from engine.runner.namespace import kv_namespace
from engine.runner.plain_steps import PlainSteps
from engine.runner.ready import log_ready, taken_bytes
from engine.runner.sampler import Sampler
from engine.runner.sizes import capture_prompts, captured_prompts, padded_size, step_sizes
from engine.runner.spreading import Spreading
from engine.runner.staged_slots import StagedSlots
from engine.runner.steps import Steps
from engine.runner.two_batch_times import choose_two_batch
from engine.runner.warm_up import StepKind, largest_steps, near_start, warm_up
from engine.settings.device import ResolvedEngineConfig
from engine.step.shape import StepShape, shape_of
from engine.weights.loading import join_loading, make_model
from kernels.host_copy import to_indices
from mesh.start_times import StartTimes
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory, Pool

_log = logging.getLogger("deepmesh.engine")


class ModelBackend:
    """An `engine.backend.Backend` over a checkpoint, or with random weights.

    Attributes:
        steps: how steps are launched, chosen once: with drafts or without.

    Raises CheckpointError if the checkpoint cannot be served, ConfigError if its KV pool does not fit.
    """

    def __init__(
        self,
        resolved: ResolvedEngineConfig,
        model: Model | None = None,
        exchange: RankExchange | None = None,
        times: StartTimes | None = None,
        warm: set[StepKind] | None = None,
        kept: Path | None = None,
    ) -> None:
        """model: by default the one that `resolved` describes; exchange: with the worker's other ranks, if there are
        any. `times` is told what each phase took. warm: kinds of steps that earlier backends of this process ran with
        this model; this one adds its own. kept: the folder that keeps what workers like this one have measured; None
        leaves the speed unknown.
        """
        times = times or StartTimes()
        config = resolved.config
        assert config.model_dir is not None
        self._config = config
        if config.rank_threads is not None:
            torch.set_num_threads(config.rank_threads)
        self.asynchronous = resolved.device == "cuda"
        self.device_name = torch.cuda.get_device_name() if self.asynchronous else "CPU"
        self._exchange = exchange or Alone()
        may_keep_all(torch.device(resolved.device), config.memory_share)
        if model is not None and exchange is not None:
            join_loading(resolved, model, exchange)
        self._model = model or self._load(resolved, exchange)
        # All ranks wait for one another here, so that no device waits for a rank that still loads.
        self._model.expert_group.meet()
        times.mark("weights")
        model_config = self._model.config
        self.draft_layers = model_config.draft_layers
        self.think_tokens = read_think_tokens(config.model_dir) if _relaxes(config) else None
        self._balancer: Balancer | None = None
        loaded = taken_bytes(self._model.device)
        warm = set() if warm is None else warm
        if resolved.warm_up and not warm and can_run_at_once(self._model, resolved):
            longest = longest_context(self._model, config)
            run_first(self._make_steps, self._model, resolved, self._step_sizes(resolved, longest), longest, warm)
        times.mark("first-runs")
        planned = plan_pool(self._model, resolved)
        times.mark("memory")
        serving = Serving(
            make=partial(self._serve_from, resolved=resolved, exchange=exchange, times=times),
            rehearse=partial(lacking_bytes, planned.workspace_bytes, self._model.device),
            run_largest_steps=partial(self._run_largest_steps, resolved),
            free=self._free,
        )
        group = self._model.expert_group
        place = self._exchange.place
        given, first = config.total_blocks is not None, place.rank == 0
        self._pool = settle_pool(planned, serving, group.least, given=given, alone=not group.divides, tells=first)
        self.block_bytes = self._pool.block_bytes
        sizes = self._step_sizes(resolved, self.context_tokens)
        times.mark("largest-steps")
        self.model = config.model_name or config.model_dir.resolve().name
        self.vocabulary_size = model_config.vocab_size
        self.eos_token_ids = model_config.eos_token_ids
        self.namespace = kv_namespace(model_config, resolved, self.state.kv_scale)
        times.mark("fingerprint")
        if sizes and resolved.warm_up:
            warm_up(self._run, self.steps, self.state, config, sizes, self.context_tokens, warm)
        times.mark("warm-up")
        file = None if kept is None else times_file(kept, model_config, self.namespace, resolved)
        known = known_times(self, file, config, self.state.padding_block, group.largest, place.dp_index)
        self.speed, self.step_times = known.speed, known.steps
        times.mark("speed")
        # Made after all steps that no request asked for, so that their choices of experts do not count.
        self._balancer = balancer_of(self._model, exchange, config.settled_balance)
        leave_to_driver(self._model.device, config.memory_share, transfer_bytes(config.transfer))
        log_ready(resolved, self.device_name, loaded, self._pool, self._model.device)

    def _load(self, resolved: ResolvedEngineConfig, exchange: RankExchange | None) -> Model:
        if not self.asynchronous:
            return make_model(resolved, exchange)
        assert resolved.config.model_dir is not None
        model_config = read_model_config(resolved.config.model_dir)
        compile_sources(model_config, resolved)
        with compiling_draws(model_config.vocab_size, resolved):
            return make_model(resolved, exchange)

    def _serve_from(
        self, pool: PoolPlan, resolved: ResolvedEngineConfig, exchange: RankExchange | None, times: StartTimes
    ) -> None:
        """Make the pool, and all that computes over it."""
        config, model = resolved.config, self._model
        self.total_blocks, self.context_tokens = pool.total_blocks, pool.context_tokens
        self.state = device_state(model, resolved, pool.total_blocks + pool.foreign_blocks, pool.context_tokens)
        self._following = Following(exchange, self.state.planes) if exchange and model.group.divides else None
        sizes = self._step_sizes(resolved, self.context_tokens)
        size = partial(padded_size, sizes=sizes)
        times.mark("memory")
        two_batch = choose_two_batch(model, self.state, resolved, self.context_tokens, size)
        times.mark("micro-batches")
        batches = MicroBatches(two_batch, size, self._spreading(config, exchange, pool.foreign_blocks))
        self.steps = self._make_steps(model, self.state, batches)
        if resolved.decode_graphs:
            prompts = capture_prompts(model, self.state, resolved, sizes, CudaCapture())
            self.steps.batches = replace(self.steps.batches, graphs=prompts)
            self.steps.capture(graph_sizes(config), self.context_tokens, CudaCapture(), two_batch)
            counts = {"decoding": self.steps.graphs.count, "prompts": 0 if prompts is None else prompts.count}
            _log.info("captured steps", extra={"fields": counts})
        times.mark("graphs")

    def _free(self) -> None:
        # Memory may have lacked before all of them were made.
        for made in ("steps", "state", "_following"):
            self.__dict__.pop(made, None)
        gc.collect()
        if self.asynchronous:
            torch.cuda.empty_cache()

    def _run_largest_steps(self, resolved: ResolvedEngineConfig) -> None:
        """On a GPU, whose memory a step could lack; a CPU grants memory as it is written."""
        config, drafts = resolved.config, resolved.config.drafts.most
        sizes = self._step_sizes(resolved, self.context_tokens)
        if not sizes or not resolved.warm_up:
            return
        limits = sizes[-1], self.context_tokens, config.max_requests
        for rows in largest_steps(*limits, self.state.padding_block, drafts, config.sparse_prefill.offered):
            shape = msgspec.structs.replace(shape_of(rows), drafts=drafts)
            captured = self.steps.graphs.fit(shape)
            self._run(self.steps, Batch(0, near_start(rows) if captured else rows), shape)

    @property
    def weights(self) -> Model:
        """The model, which took the longest to load: a later backend may take it when this one is gone."""
        return self._model

    def kv_memory(self) -> KvMemory:
        if self.asynchronous:
            # Imported only here: it needs CUDA's bindings.
            from engine.runner.device_memory import DeviceMemory

            memory: KvMemory = DeviceMemory(*self.state.planes)
        else:
            memory = HostMemory(*self._host_planes)
        return memory if self._following is None else self._following.watched(memory)

    def host_slots(self) -> HostSlots | None:
        if self.asynchronous:
            slots = host_slots(self._config, "cuda", self.block_bytes, partial(StagedSlots, self.state.planes))
        else:
            slots = host_slots(self._config, "cpu", self.block_bytes, partial(PlainSlots, self._host_planes))
        return slots if slots is None or self._following is None else self._following.watched_slots(slots)

    @property
    def _host_planes(self) -> list[Pool]:
        """On a CPU."""
        return [plane.numpy() for plane in self.state.planes]

    @torch.inference_mode()
    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        """See engine.backend.Backend."""
        first = self._model.config.num_hidden_layers
        blocks = to_indices(block_ids, self.state.device)
        for plane in self.state.planes:
            plane[first:].index_fill_(1, blocks, 0)
        if self._following is not None:
            self._following.wrote(first, self.draft_layers, block_ids)

    def launch(self, batch: Batch, shape: StepShape) -> Launched:
        """Queue the batch's tokens and the writes of their KV; without rows, only padding."""
        if self._balancer is not None:
            self._balancer.before_step()
        return self._launch(self.steps, batch, shape)

    def _run(self, steps: Steps, batch: Batch, shape: StepShape) -> None:
        """Run a step that no request asked for."""
        launched = self._launch(steps, batch, shape)
        launched.draw()
        launched.collect()

    @torch.inference_mode()
    def _launch(self, steps: Steps, batch: Batch, shape: StepShape) -> Launched:
        if self._following is not None:
            batch = self._following.next_batch(batch)
        events = StepEvents(batch.on_layers, self._exchange.check) if self.asynchronous else None
        return steps.launch(batch, shape, events)

    @property
    def captured_rows(self) -> int:
        return self.steps.graphs.most_rows

    @property
    def captured_prompt_tokens(self) -> int:
        graphs = self.steps.batches.graphs
        return 0 if graphs is None else graphs.most_tokens

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        meter = self.state.sparse_meter
        return () if meter is None else meter.drain()

    @property
    def balance(self) -> BalanceReport | None:
        return None if self._balancer is None else self._balancer.report

    def _step_sizes(self, resolved: ResolvedEngineConfig, context_tokens: int) -> Sequence[int]:
        """The sizes to which steps are padded; none on a CPU, where a new size costs nothing."""
        if not self.asynchronous:
            return ()
        config = resolved.config
        most = min(config.max_step_tokens, config.max_requests * context_tokens)
        return step_sizes(most, captured_prompts(resolved))

    def _make_steps(self, model: Model, state: DeviceState, batches: MicroBatches) -> Steps:
        config = self._config
        sampler = Sampler(config.max_requests, model.config.vocab_size, model.device, model.group)
        if not self.draft_layers:
            return PlainSteps(model, state, sampler, batches)
        rule = None
        if self.think_tokens is not None:
            rule = RelaxationRule(self.think_tokens, config.drafts.top_n, config.drafts.delta)
        return DraftSteps(Drafter(model, state, sampler, rule), batches, config)

    def _spreading(self, config: EngineConfig, exchange: RankExchange | None, count: int) -> Spreading | None:
        """count: blocks for prompts of other ranks."""
        fewest = config.parallel.divided_tokens
        if not count or exchange is None or fewest is None:
            return None
        blocks = range(self.total_blocks, self.total_blocks + count)
        return Spreading(exchange, self.state, self._model.config.num_hidden_layers, blocks, fewest)


def _relaxes(config: EngineConfig) -> bool:
    return config.drafts.most > 0 and config.drafts.acceptance == "relaxed"

"""The size of a model's KV pool on its device, and of what must fit next to it."""

from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.memory.free_memory import free_bytes
from engine.memory.memory_plan import (
    CAPTURED_LAYER_BYTES,
    CPU_POOL_BYTES,
    FRAGMENTATION,
    LEAST_POOL_PART,
    affordable_blocks,
    blocks_for_others,
    copy_bytes,
)
from engine.memory.profiling import graph_bytes, workspace_bytes
from engine.memory.rank_memory import draft_bytes, kept_bytes
from engine.memory.room import check_room
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.model.state import make_state
from engine.runner.capture import CudaCapture
from engine.runner.graph_sizes import graph_depths, graph_sizes
from engine.runner.sizes import (
    capture_decoding,
    capture_drafting,
    capture_prompts,
    captured_prompts,
    most_draft_positions,
    step_sizes,
)
from engine.runner.two_batch_times import may_take_two
from engine.settings.device import ResolvedEngineConfig
from engine.step.two_batch import ALWAYS, NEVER
from mesh.blocks import BLOCK_TOKENS, blocks_for


@dataclass(frozen=True, slots=True)
class PoolPlan:
    block_bytes: int
    total_blocks: int
    # Blocks after those of the pool, for a prompt of another rank.
    foreign_blocks: int
    # Tokens of the longest request: one that does not fit the pool alone would never end.
    context_tokens: int
    # What is left for steps and for graphs; 0 if the configuration says how many blocks there are, and on a CPU.
    workspace_bytes: int = 0
    graph_bytes: int = 0

    def with_blocks(self, blocks: int) -> "PoolPlan":
        """The same with fewer blocks."""
        foreign = min(self.foreign_blocks, blocks // LEAST_POOL_PART)
        context_tokens = min(self.context_tokens, blocks * BLOCK_TOKENS)
        return replace(self, total_blocks=blocks, foreign_blocks=foreign, context_tokens=context_tokens)


def plan_pool(model: Model, resolved: ResolvedEngineConfig) -> PoolPlan:
    """Steps and graphs are run to find out what they take, unless the configuration says how many blocks there are.

    Raises ConfigError if the pool does not fit.
    """
    config = resolved.config
    longest = longest_context(model, config)
    block_bytes, reserved = _block_bytes(model, resolved), NO_RESERVE
    if config.total_blocks is None:
        if resolved.device != "cpu":
            reserved = _reserve(model, resolved, longest, block_bytes)
        blocks, foreign = _affordable_blocks(model, resolved, longest, block_bytes, reserved)
    else:
        blocks = config.total_blocks
        foreign = _foreign_blocks(model, config, longest, blocks)
        ranks = config.parallel.ranks_a_host if resolved.device == "cpu" else 1
        free = free_bytes(model.device, config.memory_share) // ranks
        check_room(blocks + foreign, block_bytes + _draft_state_bytes(model), free)
    # All ranks take the least: ranks of a TP group hold the same KV in the same blocks, steps of all ranks have the
    # same sizes, and a chunk that one rank offers to divide must have room on all.
    blocks, foreign = map(model.expert_group.least, (blocks, foreign))
    context_tokens = min(longest, blocks * BLOCK_TOKENS)
    foreign = min(foreign, blocks_for(context_tokens))
    return PoolPlan(block_bytes, blocks, foreign, context_tokens, reserved.workspace, reserved.graphs)


def longest_context(model: Model, config: EngineConfig) -> int:
    """Tokens of the longest context, if the pool holds it."""
    longest = model.config.max_position_embeddings
    return longest if config.context_tokens is None else min(longest, config.context_tokens)


def device_state(model: Model, resolved: ResolvedEngineConfig, blocks: int, longest: int) -> DeviceState:
    """longest: tokens of a context."""
    return make_state(
        model.config,
        model.device,
        blocks=blocks,
        positions=longest + most_draft_positions(resolved.config),
        rows=resolved.config.max_requests,
        kv_dtype=getattr(torch, resolved.kv_dtype),
        kv_scale=resolved.config.kv_scale if resolved.kv_dtype == "float8_e4m3fn" else 1.0,
        drafts=resolved.config.drafts.most,
        dtype=model.dtype,
        pinned=resolved.config.drafts.pinned_acceptance,
        index_dtype=getattr(torch, resolved.index_dtype),
        sparse=resolved.config.sparse_prefill.offered is not None,
        quantized_prompts=resolved.prompt_attention_dtype == "float8_e4m3fn",
    )


def _affordable_blocks(
    model: Model, resolved: ResolvedEngineConfig, longest: int, block_bytes: int, reserved: "_Reserve"
) -> tuple[int, int]:
    """How many blocks the pool can have, and how many more there can be for prompts of other ranks."""
    config, on_cpu = resolved.config, resolved.device == "cpu"
    left = max(free_bytes(model.device, config.memory_share) - reserved.all, 0)
    # Ranks on a CPU share its memory.
    budget = int(left * resolved.kv_memory_fraction) // (config.parallel.ranks_a_host if on_cpu else 1)
    foreign = _foreign_blocks(model, config, longest, budget // block_bytes)
    blocks = affordable_blocks(
        budget_bytes=max(budget - foreign * block_bytes, 0),
        block_bytes=block_bytes + _draft_state_bytes(model),
        context_blocks=blocks_for(longest),
        max_requests=config.max_requests,
        cap_bytes=CPU_POOL_BYTES if on_cpu else None,
    )
    return blocks, foreign


@dataclass(frozen=True, slots=True)
class _Reserve:
    """Bytes that are needed next to weights and pool: by steps, by graphs, and by copies of KV."""

    workspace: int
    graphs: int
    copies: int

    @property
    def all(self) -> int:
        return self.workspace + self.graphs + self.copies


NO_RESERVE = _Reserve(0, 0, 0)


def _reserve(model: Model, resolved: ResolvedEngineConfig, longest: int, block_bytes: int) -> _Reserve:
    """Steps and graphs are run to find out, over one layer of each kind: layers take the same memory in turn."""
    model, config, item_bytes = model.short(), resolved.config, model.dtype.itemsize
    copies = copy_bytes(config, block_bytes)
    state = device_state(model, resolved, 1, longest)
    with torch.inference_mode():
        decoding = config.max_requests * (1 + config.drafts.most)
        two, sparse = may_take_two(model, config), config.sparse_prefill.offered
        measured = workspace_bytes(model, state, config.max_step_tokens, decoding, longest, sparse, two_batch=two)
        workspace = measured + draft_bytes(model.config, config.max_step_tokens, item_bytes)
        workspace += int(workspace * FRAGMENTATION)
        if not resolved.decode_graphs:
            return _Reserve(workspace, 0, copies)
        sizes, two_batch = graph_sizes(config)[-1:], ALWAYS if two else NEVER
        if config.drafts.most:
            graphs = graph_bytes(
                lambda: capture_drafting(model, state, config, sizes, longest, CudaCapture(), two_batch)
            )
        else:
            graphs = graph_bytes(lambda: capture_decoding(model, state, sizes, longest, CudaCapture(), two_batch))
        # The largest was captured alone; the others take its memory, except for what each of them keeps.
        graphs += kept_bytes(model.config, config, item_bytes)
        graphs += CAPTURED_LAYER_BYTES * model.config.num_hidden_layers * _captured_steps(resolved)
        most = captured_prompts(resolved)
        # All sizes: of R1's on four H200 the largest takes 1.80 GB alone, and all of them 2.79.
        prompt_sizes = step_sizes(config.max_step_tokens, most)
        prompts = graph_bytes(lambda: capture_prompts(model, state, resolved, prompt_sizes, CudaCapture()))
        return _Reserve(workspace, graphs + prompts, copies)


def _captured_steps(resolved: ResolvedEngineConfig) -> int:
    config, most = resolved.config, captured_prompts(resolved)
    prompts = bisect_right(step_sizes(config.max_step_tokens, most), most)
    return len(graph_sizes(config)) * len(graph_depths(config)) + prompts


def _foreign_blocks(model: Model, config: EngineConfig, longest: int, affordable: int) -> int:
    """affordable: blocks that there is room for in all."""
    parallel = config.parallel
    if parallel.divided_tokens is None or not model.expert_group.divides or model.group.divides:
        return 0
    return blocks_for_others(longest, affordable, parallel.context_parallel_reach)


def _draft_state_bytes(model: Model) -> int:
    """Bytes for each block of the pool: see DeviceState.draft_states."""
    return max(model.config.draft_layers - 1, 0) * model.config.hidden_size * model.dtype.itemsize


def _block_bytes(model: Model, resolved: ResolvedEngineConfig) -> int:
    latents, keys = (getattr(torch, dtype).itemsize for dtype in (resolved.kv_dtype, resolved.index_dtype))
    return BLOCK_TOKENS * model.config.kv_token_bytes(latents, keys)

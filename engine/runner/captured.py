"""Which steps of a configuration are captured as graphs."""

from collections.abc import Sequence

import torch

from engine.config import EngineConfig, ResolvedEngineConfig
from engine.drafts.graphs import DraftGraphs
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.pace.tails import most_rows
from engine.runner.capture import Capture
from engine.runner.graphs import DecodeGraphs, default_sizes
from engine.runner.prompt_graphs import PromptGraphs
from engine.step.two_batch import TwoBatch
from mesh.blocks import blocks_for


def graph_sizes(config: EngineConfig) -> list[int]:
    """Ascending numbers of rows of decode graphs. Steps with drafts have no more rows than the state has."""
    most = config.max_requests
    if config.graph_rows is not None:
        sizes = {min(rows, most) for rows in config.graph_rows} if config.drafts.most else {*config.graph_rows}
    elif config.drafts.most:
        sizes = {*default_sizes(most, coarse=config.drafts.next_n == "auto")}
    else:
        sizes = {*default_sizes(most), *default_sizes(most_rows(most, config.max_step_tokens))}
    return sorted(sizes)


def capture_decoding(
    model: Model, state: DeviceState, sizes: Sequence[int], longest: int, capture: Capture, two_batch: TwoBatch
) -> DecodeGraphs:
    """sizes: numbers of rows; longest: tokens of a context."""
    return DecodeGraphs(model, state, sizes, blocks_for(longest), capture, two_batch)


def capture_drafting(
    model: Model,
    state: DeviceState,
    config: EngineConfig,
    sizes: Sequence[int],
    longest: int,
    capture: Capture,
    two_batch: TwoBatch,
) -> DraftGraphs:
    """As `capture_decoding`, for steps with drafts."""
    drafts = config.drafts
    depths = range(1 + drafts.most) if drafts.next_n == "auto" else [drafts.most]
    blocks = blocks_for(longest + most_draft_positions(config))
    return DraftGraphs(model, state, sizes, depths, blocks, capture, two_batch)


def captured_prompts(resolved: ResolvedEngineConfig) -> int:
    """The most tokens of a step with prompts that is captured, except for its attention; 0 if none is."""
    config = resolved.config
    # Experts in host memory are copied to the device while the host launches layers, so layers are not captured then.
    if not resolved.decode_graphs or config.offload.layers != 0:
        return 0
    return min(config.prompt_graph_tokens, config.max_step_tokens)


@torch.inference_mode()
def capture_prompts(
    model: Model, state: DeviceState, resolved: ResolvedEngineConfig, sizes: Sequence[int], capture: Capture
) -> PromptGraphs | None:
    """Graphs of those `sizes` that are to be captured; None if none is."""
    most = captured_prompts(resolved)
    captured = [size for size in sizes if 0 < size <= most]
    return PromptGraphs(model, state, captured, capture) if captured else None


def most_draft_positions(config: EngineConfig) -> int:
    """How far drafts may be guessed after the last token of a context."""
    return 1 + config.drafts.most if config.drafts.most else 0

"""To which sizes steps are padded on a GPU, and which of them are captured as graphs.

Kernels are chosen, planned and in part compiled by the number of tokens. With few sizes a worker can run all of them
before it serves.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.drafts.graphs import DraftGraphs
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.runner.capture import Capture
from engine.runner.graph_sizes import graph_depths
from engine.runner.graphs import DecodeGraphs
from engine.runner.prompt_graphs import MOST_DECODING, PromptGraphs
from engine.settings.device import ResolvedEngineConfig
from engine.step.two_batch import TwoBatch
from mesh.blocks import blocks_for

# All sizes are multiples of it, and so is the alignment of what follows from a size.
SMALLEST = 16
# How many sizes lie between powers of two: from 128 tokens on the padding is less than an eighth.
OCTAVE_SIZES = 8
# The same for captured sizes up to FEW_TOKENS, whose padding is less than a quarter. Each captured size takes time at
# the start, and padding costs little where a layer's weights take the device more time than its tokens do.
CAPTURED_OCTAVE_SIZES = 4
FEW_TOKENS = 512


def step_sizes(most: int, captured: int = 0) -> list[int]:
    """Ascending sizes; the last is `most`, the size of full steps. captured: sizes up to this many are captured."""
    sizes, size = [], SMALLEST
    while size < most:
        sizes.append(size)
        between = CAPTURED_OCTAVE_SIZES if size < min(captured, FEW_TOKENS) else OCTAVE_SIZES
        size += max((1 << size.bit_length() - 1) // between, SMALLEST)
    return [*sizes, most]


def padded_size(tokens: int, sizes: Sequence[int]) -> int:
    """The first of ascending `sizes` that holds this many tokens; the number itself if none does.

    A draft layer may compute more tokens than a step has, one of each new prompt.
    """
    place = bisect_left(sizes, tokens)
    return sizes[place] if place < len(sizes) else tokens


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
    blocks = blocks_for(longest + most_draft_positions(config))
    return DraftGraphs(model, state, sizes, graph_depths(config), blocks, capture, two_batch)


def captured_prompts(resolved: ResolvedEngineConfig) -> int:
    """The most tokens of a step with prompts that is captured, except for attention of prompts; 0 if none is."""
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
    config = resolved.config
    decoding = min(config.max_requests * (1 + config.drafts.most), MOST_DECODING)
    return PromptGraphs(model, state, captured, capture, decoding) if captured else None


def most_draft_positions(config: EngineConfig) -> int:
    """How far drafts may be guessed after the last token of a context."""
    return 1 + config.drafts.most if config.drafts.most else 0

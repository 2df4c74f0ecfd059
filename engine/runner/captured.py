"""Which decode steps of a configuration are captured as graphs."""

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.runner.draft_graphs import DraftGraphs
from engine.runner.graphs import DecodeGraphs
from engine.two_batch import TwoBatch
from mesh.blocks import blocks_for


def capture_decoding(
    model: Model, state: DeviceState, sizes: Sequence[int], longest: int, two_batch: TwoBatch
) -> DecodeGraphs:
    """sizes: numbers of rows; longest: tokens of a context."""
    return DecodeGraphs(model, state, sizes, blocks_for(longest), two_batch)


def capture_drafting(
    model: Model, state: DeviceState, config: EngineConfig, sizes: Sequence[int], longest: int, two_batch: TwoBatch
) -> DraftGraphs:
    """As `capture_decoding`, for steps with drafts."""
    drafts = config.drafts
    depths = range(1 + drafts.most) if drafts.next_n == "auto" else [drafts.most]
    # No more rows than the state has.
    sizes = sorted({min(size, config.max_requests) for size in sizes})
    return DraftGraphs(model, state, sizes, depths, blocks_for(longest + most_draft_positions(config)), two_batch)


def most_draft_positions(config: EngineConfig) -> int:
    """How far drafts may be guessed behind the last token of a context."""
    return 1 + config.drafts.most if config.drafts.most else 0

"""What a rank is set to when its tiers are measured."""

from pathlib import Path

from bench.rank.model import MeasuredModel
from bench.tiers.decode_steps import DecodeLoad
from bench.tiers.first_tokens import ENDING_TOKENS
from engine.config import EngineConfig
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from mesh.blocks import BLOCK_TOKENS

STEP_TOKENS = 16384
# Besides those that decode.
SPARE_REQUESTS = 4


def config_of(
    measured: MeasuredModel, directory: Path, longest: int, load: DecodeLoad, layout: Layout | None = None
) -> EngineConfig:
    """longest: tokens of the longest prefix; layout: of the ranks, if there are several."""
    blocks = longest // BLOCK_TOKENS + 2
    return EngineConfig(
        **measured.settings(directory),
        parallel=ParallelConfig() if layout is None else ParallelConfig(tp=layout.tp, dp=layout.dp, ep=layout.ep),
        # The same on a CPU as on a GPU.
        dtype="bfloat16",
        max_requests=load.requests + SPARE_REQUESTS,
        # As by default, a request whose prefix is found is one row more.
        graph_rows=(1, load.requests, load.requests + SPARE_REQUESTS),
        max_step_tokens=STEP_TOKENS,
        # Small steps with prompts are the only ones that repeat: prompts' endings, and requests that decode.
        prompt_graph_tokens=64,
        context_tokens=max(longest + ENDING_TOKENS, load.context_tokens) + BLOCK_TOKENS,
        total_blocks=max(blocks, load.pool_blocks),
        host_blocks=max(blocks, load.host_blocks),
        # The bench runs each kind of step once before it measures.
        warm_up="off",
    )

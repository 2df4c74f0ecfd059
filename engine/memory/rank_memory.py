"""What a rank's GPU will hold, reckoned before torch is loaded: whether a configuration fits a card. Pure.

It counts everything that lives while the rank serves. A rank that starts measures steps and graphs in place of
reckoning them (`engine.memory.pool_plan`), and has the rest of this plan's room as a margin.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.memory.memory_plan import FRAGMENTATION, LIBRARY_BYTES, blocks_for_others, copy_bytes
from engine.memory.weight_bytes import BF16, FLOAT32, WeightBytes, weight_bytes
from engine.model.chunks import CHUNK_TOKENS, DIVIDED_CHUNKS
from engine.model.config import ModelConfig
from engine.model.indexer_config import MOST_SCORES
from engine.model.quantization import KeptWeights
from engine.parallel.layout import Layout
from engine.runner.graph_sizes import graph_sizes, kept_rows
from engine.settings.card import Card
from mesh.blocks import BLOCK_TOKENS, blocks_for

GB = 1e9
# Bytes of graphs themselves, the sampler, and what libraries take for themselves.
FIXED_WORK_BYTES = 1 << 30
# How many tensors of the hidden states' size a layer holds at a time, and a draft layer in addition.
HIDDEN_STATES, DRAFT_HIDDEN_STATES = 8, 6
# Copies of a row's logits while it is drawn: as they are computed, and in float32 with penalties, sorted and summed up.
DRAW_BYTES = BF16 + 4 * FLOAT32
# What two groups of a rank need to exchange tensors with another rank on a GPU (kernels.peer_exchange.region).
EXCHANGE_BYTES = 2 * 27_262_976
# What attention to selected tokens holds: results of queries that several multiprocessors share, with 128 heads, and of
# each query how the work is divided (kernels.mla_decode.parts).
PIECES_BYTES, DIVISION_BYTES = 18 << 20, 64
# Share of what is left that the KV pool takes.
POOL_SHARE = 0.95


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank's GPU. `there`: what it may use in all. `copies`: room for copies of experts; `drafts`: MTP
    modules. Moves of experts need no more than `exchange`.
    """

    there: int
    weights: int
    copies: int
    drafts: int
    work: int
    graphs: int
    exchange: int
    transfers: int
    library: int
    block: int
    # Blocks of the KV pool, and after them blocks for keys of other ranks' prompts.
    blocks: int
    foreign_blocks: int

    @property
    def taken(self) -> int:
        """Everything but KV."""
        loaded = self.weights + self.copies + self.drafts
        return loaded + self.work + self.graphs + self.exchange + self.transfers + self.library

    @property
    def kv_tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


def reckon(model: ModelConfig, card: Card, engine: EngineConfig, kept: KeptWeights) -> RankMemory:
    """engine: with its whole layout. Blocks are those that there is room for, or `engine.total_blocks`; 0 if none fit.

    Raises ConfigError if the ranks cannot divide the model.
    """
    layout, drafts = Layout.of(engine.parallel), engine.drafts.most
    model = replace(model, draft_layers=min(model.num_nextn_predict_layers, drafts))
    weights = weight_bytes(model, layout, kept)
    item_bytes = 1 if engine.kv_dtype == "float8_e4m3fn" else BF16
    kv_bytes = BLOCK_TOKENS * model.kv_token_bytes(item_bytes)
    states = max(model.draft_layers - 1, 0) * model.hidden_size * BF16
    found = RankMemory(
        there=int(card.memory_bytes * engine.memory_share),
        weights=weights.total - weights.drafts - _offloaded_bytes(engine, weights),
        copies=weights.with_copies(engine.balance.redundant).total - weights.total if layout.ep > 1 else 0,
        drafts=weights.drafts,
        work=int((1 + FRAGMENTATION) * _step_bytes(model, engine, layout)),
        graphs=_graph_bytes(model, engine, layout),
        exchange=EXCHANGE_BYTES * layout.world if layout.world > 1 else 0,
        transfers=copy_bytes(engine, kv_bytes),
        library=LIBRARY_BYTES,
        block=kv_bytes + states,
        blocks=0,
        foreign_blocks=0,
    )
    affordable = max(int((found.there - found.taken) * (engine.kv_memory_fraction or POOL_SHARE)), 0) // found.block
    longest = min(model.max_position_embeddings, engine.context_tokens or model.max_position_embeddings)
    foreign = 0
    if engine.parallel.divided_tokens is not None:
        foreign = min(
            blocks_for_others(longest, affordable, engine.parallel.context_parallel_reach), blocks_for(longest)
        )
    blocks = max(affordable - foreign, 0)
    if engine.total_blocks is not None:
        blocks = engine.total_blocks if engine.total_blocks + foreign <= affordable else 0
    return replace(found, blocks=blocks, foreign_blocks=foreign)


def _offloaded_bytes(engine: EngineConfig, weights: WeightBytes) -> int:
    """Experts that lie in host memory; with "auto" as many as can."""
    layers, slots = engine.offload.layers, engine.offload.slots
    offloaded = weights.expert_layers if layers == "auto" else min(layers, weights.expert_layers)
    return max(offloaded - slots, 0) * weights.layer_experts


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits; 0 if none does. Of two that fit, so does every one below them."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def work_bytes(config: ModelConfig, step_tokens: int, item_bytes: int, ranks: int) -> int:
    """About what a step's tensors take, before there is a model to run one: for DeepSeek-R1 and 16,384 tokens 8 GB,
    11 on ranks that divide the experts. ranks: how many divide them, with as many tokens each.

    Queries, keys, values and outputs of all heads, hidden states, and the copies of a chunk's tokens for their experts.
    """
    heads = config.num_attention_heads * 2 * (config.qk_head_dim + config.v_head_dim)
    token_bytes = (heads + HIDDEN_STATES * config.hidden_size) * item_bytes
    copies = config.num_experts_per_tok + config.n_shared_experts
    # A copy in FP8, gate and up, what is between, its form in FP8, and the output.
    copy_bytes = config.hidden_size * (1 + item_bytes) + config.moe_intermediate_size * (3 * item_bytes + 1)
    chunk = CHUNK_TOKENS if ranks == 1 else DIVIDED_CHUNKS * CHUNK_TOKENS // ranks
    copied_tokens = min(step_tokens, chunk) * ranks
    return FIXED_WORK_BYTES + step_tokens * token_bytes + copied_tokens * copies * copy_bytes


def draft_bytes(model: ModelConfig, step_tokens: int, item_bytes: int) -> int:
    """What draft layers take of a step of prompts in addition to the model's layers."""
    return step_tokens * DRAFT_HIDDEN_STATES * model.hidden_size * item_bytes if model.draft_layers else 0


def kept_bytes(model: ModelConfig, engine: EngineConfig, item_bytes: int) -> int:
    """Outputs of all captured decode steps: logits, or hidden states where draws follow of rows with drafts."""
    width = model.hidden_size if engine.drafts.most else model.vocab_size
    return kept_rows(engine) * width * item_bytes


def _step_bytes(model: ModelConfig, engine: EngineConfig, layout: Layout) -> int:
    """The largest step of any kind, and the sampler's counts."""
    heads = replace(model, num_attention_heads=model.num_attention_heads // layout.tp)
    prompts = work_bytes(heads, engine.max_step_tokens, BF16, layout.world)
    prompts += draft_bytes(model, engine.max_step_tokens, BF16)
    if engine.prompt_attention_dtype == "float8_e4m3fn":
        # Queries, keys and values once more, in one byte.
        width = 2 * model.qk_head_dim + model.v_head_dim
        prompts += engine.max_step_tokens * heads.num_attention_heads * width
    prompts += _index_bytes(model, engine.max_step_tokens, MOST_SCORES)
    rows = engine.max_requests * (1 + engine.drafts.most)
    counts = rows * model.vocab_size * FLOAT32
    return counts + max(prompts, work_bytes(heads, rows, BF16, layout.world) + rows * model.vocab_size * DRAW_BYTES)


def _index_bytes(model: ModelConfig, tokens: int, most_scores: int | None = None) -> int:
    """Scores of all that queries may see, perhaps in parts of `most_scores`, queries of indexers with what their
    quantization holds, and what attention to the selected tokens holds.
    """
    if model.indexer is None:
        return 0
    scores = tokens * model.max_position_embeddings
    if most_scores is not None:
        scores = min(scores, max(most_scores, model.max_position_embeddings))
    queries = FLOAT32 * (3 * model.indexer.heads * model.indexer.width + model.indexer.top_k)
    return PIECES_BYTES + FLOAT32 * scores + tokens * (queries + DIVISION_BYTES)


def _graph_bytes(model: ModelConfig, engine: EngineConfig, layout: Layout) -> int:
    """Memory of captured steps: of the largest, which the others share, and of the outputs that each keeps."""
    if engine.decode_graphs == "off":
        return 0
    heads = replace(model, num_attention_heads=model.num_attention_heads // layout.tp)
    most = graph_sizes(engine)[-1] * (1 + engine.drafts.most)
    captured = most, min(engine.prompt_graph_tokens, engine.max_step_tokens)
    pools = (work_bytes(heads, tokens, BF16, layout.world) - FIXED_WORK_BYTES for tokens in captured)
    return kept_bytes(model, engine, BF16) + sum(pools) + _index_bytes(model, most)

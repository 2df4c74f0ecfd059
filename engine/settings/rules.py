"""Which value each setting gets on a GPU if none is given: a pure rule for each, by what was measured.

The figures are those of docs/performance.md, docs/drafts.md and the notes that the reasons name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from engine.config import EngineConfig
from engine.drafts.config import MOST_DRAFTS
from engine.memory.rank_memory import RankMemory, reckon
from engine.model.config import ModelConfig
from engine.model.quantization import KeptWeights, Stored
from engine.pace.mixed_steps import FEWEST_CAPTURED
from engine.parallel.config import FEWEST_DIVIDED
from engine.parallel.layout import Layout
from engine.runner.graph_sizes import graph_sizes
from engine.settings.card import Card
from engine.settings.choice import Choice, is_given, value_of, with_value
from engine.settings.model_cost import r1_step_seconds, requests_for_one, step_seconds, tokens_for_one
from engine.settings.quality import Shown
from mesh.domain.workers import WorkerRole
from transfer.config import TransferConfig

# What FP8 attention to prompts is made for: the major compute capability, and widths of a head: own, rotated, value.
HOPPER, FP8_PROMPT_WIDTHS = 9, (128, 64, 128)
# Prompt and answer of the load that docs/performance.md measures.
REQUEST_TOKENS = 3500 + 1000
# A rank is worth starting if its KV holds this many such requests.
FEWEST_REQUESTS = 8
# What makes answers quicker may take this share of the tokens of KV that there would be without it.
SPENT_SHARE = 0.25
# Requests of a rank, by aim: steps of 32, 96 and 128 were measured.
REQUESTS: Mapping[str, int] = MappingProxyType({"latency": 32, "balanced": 96, "throughput": 128})
# A lighter model than DeepSeek-R1 runs more of them, in multiples, up to the longest step that was measured.
REQUESTS_MULTIPLE, MOST_REQUESTS = 32, 256
# Tokens of a step with which the rates of prompts were measured.
THROUGHPUT_STEP = 16384
# Tokens of a step of one rank of DeepSeek-R1, which holds up answers for 0.2 s, and the most of a lighter model's.
STEP, LIGHT_STEP = 2048, 8192
# Steps of ranks that compute prompts together, and of workers that only compute prompts.
SHARED_STEP = 4096
# Most copies of experts that were measured on a part of the experts.
COPIES = 2
# The reason of settings of transfers where there are none.
NO_TRANSFERS = "engine.transfer is null: no KV moves to or from other processes"
# Layers of DeepSeek-R1, for which the largest captured step with prompts was measured.
R1_LAYERS = 61


@dataclass(frozen=True)
class Situation:
    """engine: with its whole layout, the given settings and those chosen so far. drafts: whether the checkpoint has
    MTP modules. shown: see `engine.settings.quality`.
    """

    model: ModelConfig
    card: Card
    role: WorkerRole
    engine: EngineConfig
    drafts: bool
    kept: KeptWeights
    shown: Mapping[tuple[str, str], Shown]

    @property
    def layout(self) -> Layout:
        return Layout.of(self.engine.parallel)

    @property
    def memory(self) -> RankMemory:
        return reckon(self.model, self.card, self.engine, self.kept)

    def changed(self, key: str, value: Any) -> "Situation":
        return replace(self, engine=with_value(self.engine, key, value))

    def spends_little(self, key: str, value: Any) -> bool:
        """Whether KV keeps most of its tokens, and enough of them, with this value."""
        without, with_it = self.memory.kv_tokens, self.changed(key, value).memory.kv_tokens
        return with_it >= max(FEWEST_REQUESTS * REQUEST_TOKENS, (1 - SPENT_SHARE) * without)


Rule = Callable[[Situation], Choice]


def weights(at: Situation) -> Choice:
    return Choice("weights", at.engine.weights, "as published; --set engine.weights=fp8 or w4a8 quantizes plain ones")


def kv_dtype(at: Situation) -> Choice:
    return _format(at, "kv_dtype", "FP8 holds twice the tokens")


def prompt_attention_dtype(at: Situation) -> Choice:
    key, model = "prompt_attention_dtype", at.model
    widths = (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim)
    made_for = model.quantization.linear is Stored.FP8 and widths == FP8_PROMPT_WIDTHS
    if at.card.capability[0] != HOPPER or not made_for:
        return Choice(key, "auto", "as published: FP8 attention is for FP8 models of DeepSeek-V3's widths on Hopper")
    if model.indexer is not None:
        return Choice(key, "auto", "as published: no page of quality has models with indexers and FP8 attention")
    if at.layout.world > 1:
        return Choice(key, "auto", "as published: FP8 attention was measured and compared on single GPUs alone")
    return _format(at, key, "FP8 attends 1.2 to 1.4 times as fast from 8,192 tokens on")


def _format(at: Situation, key: str, gain: str) -> Choice:
    """FP8, if its kernels were shown to answer as well and published formats are not wanted; else as published."""
    shown = at.shown.get((key, "float8_e4m3fn"))
    if at.engine.exact:
        return Choice(key, "auto", "engine.exact keeps the published formats")
    if shown is not None and shown.allows:
        return Choice(key, "float8_e4m3fn", f"{gain}, and {shown}")
    return Choice(key, "auto", f"as published: {gain}, but {shown or 'no page of quality has it'}")


def drafts(at: Situation) -> Choice:
    key = "drafts.next_n"
    if not at.drafts:
        return Choice(key, 0, "the checkpoint has no MTP module")
    if at.role is WorkerRole.PREFILL:
        return _affordable(at, key, 1, 0, "the prompt's KV of the draft layer makes decode workers' guesses better")
    rows = at.engine.max_requests * (1 + MOST_DRAFTS)
    if is_given(at.engine, "max_step_tokens") and rows > at.engine.max_step_tokens:
        return Choice(key, 0, f"{rows} rows of requests and drafts exceed engine.max_step_tokens")
    gain = "2.5, 2.0 and 1.6 times the tokens/s at 8, 32 and 64 requests with three, and each step chooses its depth"
    return _affordable(at, key, "auto", 0, gain)


def max_requests(at: Situation) -> Choice:
    key = "max_requests"
    if at.role is WorkerRole.PREFILL:
        return Choice(key, 64, "prompts run one after another; more of them only wait with their KV")
    wanted, why = _requests(at)
    if at.layout.tp > 1 and at.layout.dp == 1:
        wanted, why = 32, "up to 32 rows a TP group exchanges twice a layer, four times beyond"
    if is_given(at.engine, "max_step_tokens"):
        most = at.engine.max_step_tokens // (1 + at.engine.drafts.most)
        if most < wanted:
            wanted, why = most, f"as many as engine.max_step_tokens={at.engine.max_step_tokens} has rows for"
    return Choice(key, wanted, why)


def _requests(at: Situation) -> tuple[int, str]:
    """Requests of a rank where its layout and its steps are no limit, and why."""
    aim = at.engine.aim
    measured = REQUESTS[aim]
    # No number was measured of a model that selects tokens.
    if aim != "latency" and at.model.indexer is None:
        as_long = int(measured * requests_for_one(at.model)) // REQUESTS_MULTIPLE * REQUESTS_MULTIPLE
        if measured < as_long < MOST_REQUESTS and _runs_most(at, measured):
            return MOST_REQUESTS, f"for {aim}: KV has room for them, and their step is shorter than R1's of {measured}"
        if as_long > measured:
            why = f"for {aim}: attention to {as_long} takes as long as R1's to {measured}"
            if as_long > MOST_REQUESTS:
                why += f", and {MOST_REQUESTS} are the most that were measured"
            return min(as_long, MOST_REQUESTS), why
    return measured, f"for {aim}: steps of {measured} requests were measured"


def _runs_most(at: Situation, measured: int) -> bool:
    """Whether MOST_REQUESTS of the measured load have room, and take no longer than `measured` of DeepSeek-R1."""
    memory = at.changed("max_requests", MOST_REQUESTS).memory
    has_room = memory.kv_tokens >= MOST_REQUESTS * REQUEST_TOKENS
    return has_room and step_seconds(at.model, memory.weights, MOST_REQUESTS) <= r1_step_seconds(measured)


def max_step_tokens(at: Situation) -> Choice:
    key, (wanted, why) = "max_step_tokens", _step(at)
    least = at.engine.max_requests * (1 + at.engine.drafts.most)
    if least > wanted:
        wanted, why = least, "each request has a token and its drafts in a step"
    if _holds(at.changed(key, wanted)):
        return Choice(key, wanted, why)
    sizes = _halves(wanted, max(least, FEWEST_DIVIDED))
    smaller = next((size for size in sizes if _holds(at.changed(key, size))), sizes[-1])
    return Choice(key, smaller, f"{wanted} would leave too little KV")


def _step(at: Situation) -> tuple[int, str]:
    """Tokens of a step where memory is no limit, and why."""
    if at.engine.aim == "throughput":
        return THROUGHPUT_STEP, "the steps with which 9,974 prompt tokens/s of R1's rank were measured"
    if at.role is WorkerRole.PREFILL:
        return SHARED_STEP, "97.6% of the load in time, for 93.0% with 16,384 (docs/fleet.md, simulated)"
    if at.layout.tp > 1 and at.layout.dp == 1:
        return SHARED_STEP, "0.15 s at the 28,021 tokens/s of four H200 that compute a prompt together"
    if at.layout.world > 1:
        return (
            SHARED_STEP,
            "eight ranks of R1 serve 4.5 requests/s in time, and with 2,048 a quarter of them (sim/notes.md)",
        )
    tokens = STEP
    if at.engine.aim == "balanced":
        as_long = STEP * tokens_for_one(at.model)
        while 2 * tokens <= min(as_long, LIGHT_STEP):
            tokens *= 2
    return tokens, f"holds up answers no longer than {STEP} tokens of R1 do, 0.2 s"


def graph_rows(at: Situation) -> Choice:
    sizes = graph_sizes(at.engine)
    why = f"steps of 1 to {sizes[-1]} rows are captured in {len(sizes)} sizes, closest where a row costs most"
    return Choice("graph_rows", None, why)


def prompt_graph_tokens(at: Situation) -> Choice:
    # A host's time to launch a step grows with the layers, and the device's time for a token with the active weights.
    alike = 1536 * at.model.num_hidden_layers / R1_LAYERS * tokens_for_one(at.model)
    # With drafts, other formats or several ranks such large steps were never captured.
    formats = at.model.quantization
    plain = not formats.quantized and formats.experts is Stored.PLAIN and at.engine.weights not in ("fp8", "w4a8")
    ran = plain and at.layout.world == 1 and not at.engine.drafts.most
    if ran and alike >= FEWEST_CAPTURED and at.engine.max_step_tokens >= FEWEST_CAPTURED:
        why = "a light model: prompts of 1,000 have a first token after 43 ms, for 63 with 1536 (Moonlight, an H200)"
        return Choice("prompt_graph_tokens", FEWEST_CAPTURED, why)
    return Choice("prompt_graph_tokens", 1536, "steps of 512 and 875 tokens take 1.6 and 1.4 times as long uncaptured")


def copies(at: Situation) -> Choice:
    key = "balance.redundant"
    if at.layout.ep == 1:
        return Choice(key, 0, "each rank has all experts")
    if at.engine.settled_balance.interval_steps is None:
        return Choice(key, 0, "experts stay where they are, so copies of them would not follow the load")
    experts = at.model.n_routed_experts
    if experts - -(-experts // at.layout.ep) < COPIES:
        return Choice(key, 0, "each rank has nearly all experts")
    gain = "uneven choices make a step 1.04 times as long with them and moves, for 1.30 without (four H200)"
    return _affordable(at, key, COPIES, 0, gain)


def context_parallel_tokens(at: Situation) -> Choice:
    tokens = at.engine.parallel.divided_tokens
    why = "there is one rank" if at.layout.world == 1 else "all ranks compute each prompt: they are a TP group"
    if at.layout.dp > 1:
        why = "each rank computes its own prompts"
    if tokens is not None:
        why = f"from {tokens} tokens on ranks share a prompt: 2.9 times as fast on four at 32,768 tokens"
    return Choice("parallel.context_parallel_tokens", "auto", why)


def prompt_wait_steps(at: Situation) -> Choice:
    key = "parallel.prompt_wait_steps"
    if at.engine.aim == "latency":
        return Choice(key, 0, "a first token waits for no other rank's prompt")
    why = "ranks begin short prompts together: 2.5 requests/s all in time, for 29% (simulated)"
    return Choice(key, 16, why if at.layout.dp > 1 else "no other rank has prompts to wait for")


def mixed_step_ms(at: Situation) -> Choice:
    key = "mixed_step_ms"
    if at.engine.aim == "throughput":
        return Choice(key, None, "prompts that come at once are computed in the fewest steps")
    why = "a step with prompts takes as long as it needs: shorter ones are hardly quicker to launch"
    if at.role is WorkerRole.PREFILL:
        why = "no requests decode next to prompts here"
    elif at.layout.tp > 1:
        why = "whole prompts: even steps of a TP group were not measured"
    elif at.layout.world > 1 and at.engine.prompt_graph_tokens:
        why = "99% of tokens come within 73 ms next to prompts of 3,500, within 141 without (R1, two H200, 28 layers)"
    elif at.engine.prompt_graph_tokens >= FEWEST_CAPTURED:
        why = "99% of tokens come within 36 ms next to prompts of 4,000, within 83 without (Moonlight, an H200)"
    return Choice(key, "auto", why)


def prompt_share(at: Situation) -> Choice:
    why = "no limit: all requests kept 50 ms a token without one, and 86 to 98% with half of the time (sim/notes.md)"
    return Choice("prompt_share", None, why)


def host_blocks(at: Situation) -> Choice:
    why = "a tenth of the host's memory, locked once it serves: later turns begin after 74 ms, 4,558 without (an H200)"
    return Choice("host_blocks", "auto", why)


def slot_bytes(at: Situation) -> Choice:
    why = "the most of a transfer at once: the host takes as long for a smaller part"
    return Choice("transfer.slot_bytes", TransferConfig().slot_bytes, why)


# In this order: each sees what those before it have chosen.
RULES: Sequence[Rule] = (
    weights,
    kv_dtype,
    prompt_attention_dtype,
    slot_bytes,
    max_requests,
    drafts,
    max_step_tokens,
    copies,
    graph_rows,
    prompt_graph_tokens,
    context_parallel_tokens,
    prompt_wait_steps,
    mixed_step_ms,
    prompt_share,
    host_blocks,
)


def _affordable(at: Situation, key: str, value: Any, otherwise: Any, gain: str) -> Choice:
    if at.spends_little(key, value):
        return Choice(key, value, gain)
    left, before = at.changed(key, value).memory.kv_tokens, at.memory.kv_tokens
    return Choice(key, otherwise, f"{value} would leave {left:,} of {before:,} tokens of KV")


def _holds(at: Situation) -> bool:
    return at.memory.kv_tokens >= FEWEST_REQUESTS * REQUEST_TOKENS


def _halves(most: int, least: int) -> Sequence[int]:
    sizes = [most]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def given(at: Situation, key: str) -> Choice | None:
    """The value that somebody gave, or one in a section that is not there; None if the rule decides."""
    section = key.rpartition(".")[0]
    if section and value_of(at.engine, section) is None:
        return Choice(key, None, NO_TRANSFERS)
    return Choice(key, value_of(at.engine, key), "as given") if is_given(at.engine, key) else None

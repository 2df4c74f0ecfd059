"""The recipe: the model's size, the stages, the learning rates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from models.train.mixture import Mixture
from models.train.packing import BatchShape

# config.json of tiny-r1.
TINY_R1: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 768,
        "kv_lora_rank": 512,
        "max_position_embeddings": 16384,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 7,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        # The model is trained with these frequencies from the first step, so that they are exact at any length.
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 1536,
    }
)


# config.json of tiny-r1 with indexers, which DeepSeek-V3.2 has in addition.
TINY_V32: Mapping[str, Any] = MappingProxyType(
    {
        **TINY_R1,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 512,
    }
)


@dataclass(frozen=True)
class Stage:
    name: str
    # Share of the training time.
    share: float
    mixture: Mixture
    shape: BatchShape
    # Whether linear layers round weights and activations as FP8 inference does.
    fp8: bool = False
    # How indexers learn: see `TinyModel.train_indexers`. None if there are none.
    indexers: Literal["alone", "with all"] | None = None


@dataclass(frozen=True)
class Checkup:
    """The held-out problems that are retraced now and then in training: how many of each short task, and how many of
    each long task at each length."""

    short_problems: int
    long_problems: int
    long_tokens: tuple[int, ...]
    shape: BatchShape
    # How many conversations with tools, and how many answers in JSON.
    talks: int = 0


@dataclass(frozen=True)
class Recipe:
    config: Mapping[str, Any]
    stages: tuple[Stage, ...]
    checkup: Checkup
    seed: int = 0
    # Learning rates of the matrices (Muon), and of everything else (Adam).
    matrix_rate: float = 0.02
    matrix_decay: float = 0.01
    rate: float = 0.003
    # The learning rate of indexers (Adam).
    index_rate: float = 0.001
    # Rates rise linearly until the first share of the time has passed, and fall linearly to 0 after the second.
    warm_up: float = 0.01
    decay_from: float = 0.35
    # Weight of the MTP module's loss.
    second_token_weight: float = 0.3
    # Step by which experts' biases move, and the share of the time after which they stay unchanged.
    balance_speed: float = 0.002
    balance_until: float = 0.9

    def in_batches_of(self, tokens: int) -> "Recipe":
        """The same with fewer tokens in a step, and without the documents that are longer than a step. Rates fall with
        the square root of the tokens, as Adam's noise asks (Malladi et al., 2022, "On the SDEs and scaling rules for
        adaptive gradient algorithms").
        """
        slower = (tokens / self.stages[0].shape.tokens) ** 0.5
        stages = tuple(replace(stage, shape=stage.shape.shrunk(tokens)) for stage in self.stages)
        checkup = self.checkup
        fitting = tuple(length for length in checkup.long_tokens if 2 * length <= tokens)
        return replace(
            self,
            stages=stages,
            checkup=replace(checkup, long_tokens=fitting, shape=checkup.shape.shrunk(tokens)),
            matrix_rate=self.matrix_rate * slower,
            rate=self.rate * slower,
            index_rate=self.index_rate * slower,
            balance_speed=self.balance_speed * slower,
        )

    def rate_factor(self, progress: float) -> float:
        """The factor on the rates at this share of the training time."""
        if progress < self.warm_up:
            return progress / self.warm_up
        return min(1.0, max(0.0, (1 - progress) / (1 - self.decay_from)))


SHORT_CONTEXTS = Stage("short", 0.5, Mixture(0.06, (200, 900)), BatchShape(65536, 1024, 512))
LONG_CONTEXTS = Stage("long", 0.35, Mixture(0.03, (1000, 15_500)), BatchShape(65536, 16384, 256))
FINISH = replace(LONG_CONTEXTS, name="finish", share=0.15, fp8=True)
RECIPE = Recipe(
    TINY_R1, (SHORT_CONTEXTS, LONG_CONTEXTS, FINISH), Checkup(32, 16, (2048, 8192), BatchShape(65536, 16384, 1024))
)

# More training of a finished checkpoint, in which it learns to call tools and to write JSON. Half of the examples are
# of what it can already do, long contexts among them, so that it forgets nothing. Without the quiet ones it would write
# calls wherever it is not to think, even if no tools are offered.
TALK = replace(
    LONG_CONTEXTS.mixture,
    small_talk_share=0.06,
    library_share=0.02,
    conversation_share=0.04,
    quiet_share=0.12,
    tool_share=0.19,
    json_share=0.13,
)
TOOLS = Stage("tools", 0.85, TALK, LONG_CONTEXTS.shape)
TOOLS_FINISH = replace(TOOLS, name="tools_finish", share=0.15, fp8=True)
MORE = Recipe(
    TINY_R1,
    (TOOLS, TOOLS_FINISH),
    replace(RECIPE.checkup, talks=32),
    seed=20,
    matrix_rate=0.005,
    rate=0.001,
    warm_up=0.02,
    balance_speed=0.001,
)

# Indexers for a finished checkpoint, in the two stages of DeepSeek-V3.2 (2025), section 2.1.1: they learn to foresee
# attention to all tokens, with all else as it is; then all learns while attention goes to what they choose. Their rate
# is the published one of the first stage. Most tokens are of long contexts, since little is left out of short ones.
# Steps are small, because each takes a time that grows with their square.
INDEX_SHAPE = BatchShape(16384, 16384, 64)
FORESEE = Stage(
    "foresee", 0.1, replace(TALK, long_share=0.2, long_tokens=(2000, 15_500)), INDEX_SHAPE, indexers="alone"
)
CHOOSE = replace(FORESEE, name="choose", share=0.72, indexers="with all")
CHOOSE_FINISH = replace(CHOOSE, name="choose_finish", share=0.18, fp8=True)
INDEXED = Recipe(
    TINY_V32,
    (FORESEE, CHOOSE, CHOOSE_FINISH),
    Checkup(8, 2, (2048, 8192), INDEX_SHAPE, talks=8),
    seed=40,
    matrix_rate=0.001,
    rate=0.0002,
    warm_up=0.02,
    decay_from=0.4,
    balance_speed=0.0002,
)

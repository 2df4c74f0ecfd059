"""What config.json of each published model says where it differs from DeepSeek-V3's, for tiny checkpoints."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "num_nextn_predict_layers": 0,
}
# Selection matters from 40 tokens on. With fewer heads many scores would be 0, and equal ones are transformers' choice.
_INDEXED = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 40}
YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
# By model; widths are tiny, their proportions as published.
FAMILY: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek-v2-lite": _V2
        | {
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        "deepseek-v2": _V2 | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        "moonlight": {
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "routed_scaling_factor": 2.446,
        },
        "glm-4.7-flash": {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "num_attention_heads": 5,
            "qk_nope_head_dim": 48,
            "v_head_dim": 64,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
        },
        "deepseek-v3.2": _INDEXED | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
        "glm-5": _INDEXED
        | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "qk_nope_head_dim": 48,
            "v_head_dim": 64,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "indexer_types": ["full", "shared", "full"],
        },
        "gigachat3": {"v_head_dim": 48, "n_group": 1, "topk_group": 1},
    }
)

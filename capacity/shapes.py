"""Published models' shapes, as config.json says them, and the formats that their weights may have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tools.quantization_configs import FP8_CONFIG, NVFP4_CONFIG, W4A8_CONFIG

DEEPSEEK_R1: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "eos_token_id": 1,
        "quantization_config": dict(FP8_CONFIG),
    }
)
DEEPSEEK_V32: Mapping[str, Any] = MappingProxyType(
    dict(DEEPSEEK_R1)
    | {
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rms_norm_eps": 1e-6,
    }
)
GLM_5: Mapping[str, Any] = MappingProxyType(
    dict(DEEPSEEK_V32)
    | {
        "model_type": "glm_moe_dsa",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "intermediate_size": 12288,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "max_position_embeddings": 202752,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [154820, 154827, 154829],
    }
)
MOONLIGHT: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 50000,
        "eos_token_id": 163585,
    }
)
DEEPSEEK_V2_LITE: Mapping[str, Any] = MappingProxyType(
    dict(MOONLIGHT)
    | {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "intermediate_size": 10944,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": dict(DEEPSEEK_R1["rope_scaling"]) | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "eos_token_id": 100001,
    }
)
GLM_FLASH: Mapping[str, Any] = MappingProxyType(
    dict(MOONLIGHT)
    | {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752,
        "rope_theta": 1000000,
        "eos_token_id": [154820, 154827, 154829],
    }
)
NARROW: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
)
# "r1-ep8-rank" stands for one of 8 ranks. Such a rank has an eighth of the tokens, and its experts get an eighth of all
# choices. They get as many if the rank's own tokens choose among its own experts alone.
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "r1-ep8-rank": dict(DEEPSEEK_R1) | {"n_routed_experts": 32, "n_group": 1, "topk_group": 1},
        # The whole model, for ranks that divide it.
        "r1": DEEPSEEK_R1,
        # The same of models that attend to what indexers select.
        "v32-ep8-rank": dict(DEEPSEEK_V32) | {"n_routed_experts": 32, "n_group": 1, "topk_group": 1},
        "v32": DEEPSEEK_V32,
        "glm-5-ep8-rank": dict(GLM_5) | {"n_routed_experts": 32},
        "glm-5": GLM_5,
        # The same with one expert group: tokens choose among all experts, so that choices can follow a distribution.
        "r1-one-group": dict(DEEPSEEK_R1) | {"n_group": 1, "topk_group": 1},
        # R1's KV with little around it, for what moves KV on a machine without a GPU.
        "r1-kv": dict(DEEPSEEK_R1) | dict(NARROW),
        # Models that one card holds.
        "moonlight": MOONLIGHT,
        "v2-lite": DEEPSEEK_V2_LITE,
        "glm-flash": GLM_FLASH,
    }
)
# config.json's description of the form of routed experts. All else is FP8, except with "nvfp4": then dense layers and
# shared experts are NVFP4 too, and attention is bfloat16. With "bf16" all weights are.
EXPERTS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {"fp8": dict(FP8_CONFIG), "w4a8": dict(W4A8_CONFIG), "nvfp4": dict(NVFP4_CONFIG), "bf16": None}
)

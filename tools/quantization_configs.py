"""The published `quantization_config` in config.json of each form of quantized weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FP8_CONFIG: Mapping[str, Any] = MappingProxyType(
    {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
)
# Routed experts in INT4, the rest in FP8. Activations have static scales if the checkpoint has tensors with them.
W4A8_CONFIG: Mapping[str, Any] = MappingProxyType(
    {"group_size": 128, "quant_method": "w4afp8", "weight_block_size": [128, 128]}
)
# Routed experts, shared experts and dense layers in NVFP4, as ModelOpt writes it; the rest in bfloat16.
NVFP4_CONFIG: Mapping[str, Any] = MappingProxyType({"quant_algo": "NVFP4", "quant_method": "modelopt"})

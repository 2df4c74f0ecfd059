"""What config.json says of quantized weights, as it is published: `quantization_config` by form."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FP8_CONFIG: Mapping[str, Any] = MappingProxyType(
    {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
)
# INT4 experts; the rest in FP8. The tensors decide whether activations have static scales.
W4A8_CONFIG: Mapping[str, Any] = MappingProxyType(
    {"group_size": 128, "quant_method": "w4afp8", "weight_block_size": [128, 128]}
)
# NVFP4 in experts, shared ones and dense layers, as ModelOpt writes it; the rest in bfloat16.
NVFP4_CONFIG: Mapping[str, Any] = MappingProxyType({"quant_algo": "NVFP4", "quant_method": "modelopt"})

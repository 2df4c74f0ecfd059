"""The forms in which a layer takes its input."""

from enum import Enum, auto

import torch

from kernels.act_quant import Quantized
from kernels.w4a8_gemm import ScaledRows


class InputForm(Enum):
    # The model's dtype.
    PLAIN = auto()
    # e4m3 with a float32 scale for each row and 128 channels (`Quantized`).
    FP8_GROUPS = auto()


Activations = torch.Tensor | Quantized
# What travels to experts on other ranks.
Sent = Activations | ScaledRows

"""The angles of rotary position embedding, with YaRN as DeepSeek applies it."""

import math

import torch

from engine.model.config import ModelConfig
from engine.model.yarn import Yarn


def rotation_table(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [max_position_embeddings, rope / 2] each."""
    width = config.qk_rope_head_dim
    frequencies = config.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    scale = 1.0
    if config.yarn:
        frequencies = _interpolated(frequencies, config.yarn, config.rope_theta, width)
        scale = config.yarn.rotation_scale
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float64), frequencies)
    return (angles.cos() * scale).float(), (angles.sin() * scale).float()


def _interpolated(frequencies: torch.Tensor, yarn: Yarn, theta: float, width: int) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend linearly between them (section 3.2)."""

    def pair_that_turns(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations within the original context."""
        wavelengths = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(wavelengths) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * slowed + frequencies * (1 - slowed)

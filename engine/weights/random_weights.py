"""Weights without a checkpoint, for measurements: drawn where they lie, hundreds of gigabytes a second on a GPU."""

from collections.abc import Mapping

import torch

from engine.model.parameters import published_shape

# Clears the highest bit of an e4m3 exponent: any byte becomes a number below 2, and none NaN.
BELOW_TWO = 0xBF
# Root mean square of what is left of a random byte.
BYTE_RMS = 0.62


def fill_randomly(parameters: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Fill what `Model.parameters` lists so that activations keep their magnitude from layer to layer.

    Norms get ones, biases zeros, matrices independent values of variance 1 / inputs; FP8 values are random bytes.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in parameters.items():
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
        generator = generators[parameter.device]
        if parameter.dtype == torch.float8_e4m3fn:
            raw = parameter.view(torch.uint8)
            raw.random_(0, 256, generator=generator).bitwise_and_(BELOW_TWO)
        elif name.endswith("_scale_inv"):
            # A scale a block of 128 inputs.
            parameter.fill_((128 * published_shape(parameter)[1]) ** -0.5 / BYTE_RMS)
        elif parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            parameter.normal_(0.0, published_shape(parameter)[1] ** -0.5, generator=generator)

"""Weights without a checkpoint, for measurements: drawn where they lie, hundreds of gigabytes a second on a GPU."""

from collections.abc import Iterable

import torch

from engine.model.parameters import Parameter

# Clears the highest bit of an e4m3 exponent: any byte becomes a number below 2, and none NaN.
BELOW_TWO = 0xBF
# Root mean square of what is left of a random byte.
BYTE_RMS = 0.62


def fill_randomly(parameters: Iterable[Parameter], seed: int = 0) -> None:
    """Fill what `Model.parameters` lists so that activations keep their magnitude from layer to layer.

    Norms get ones, biases zeros, matrices independent values of variance 1 / inputs; FP8 values are random bytes.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        name, place, inputs = parameter.name, parameter.place, parameter.shape[-1]
        if place.device not in generators:
            generators[place.device] = torch.Generator(place.device).manual_seed(seed)
        generator = generators[place.device]
        if place.dtype == torch.float8_e4m3fn:
            raw = place.view(torch.uint8)
            raw.random_(0, 256, generator=generator).bitwise_and_(BELOW_TWO)
        elif name.endswith("_scale_inv"):
            # A scale a block of 128 inputs.
            place.fill_((128 * inputs) ** -0.5 / BYTE_RMS)
        elif place.dim() == 1:
            place.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            place.normal_(0.0, inputs**-0.5, generator=generator)

"""Weights without a checkpoint, for measurements: drawn where they lie, hundreds of gigabytes a second on a GPU."""

from collections.abc import Iterable

import torch

from engine.model.parameters import Parameter
from engine.weights.stored import GLOBAL_SCALE_SUFFIX, INPUT_SCALE, PRE_SCALE, SCALE_SUFFIX

# Clears the highest bit of an e4m3 exponent: any byte becomes a number below 2, and none NaN.
BELOW_TWO = 0xBF
# Root mean square of what is left of a random byte.
BYTE_RMS = 0.62
# Root mean square of a random e2m1 code's value.
CODE_RMS = 2.93
# Root mean square of an integer.
INTEGER_RMS = 4.18
# The largest magnitude that an expert's input is taken to have.
LARGEST_INPUT = 8.0


def fill_randomly(parameters: Iterable[Parameter], device: torch.device, seed: int = 0) -> None:
    """Fill what `Model.parameters` lists so that activations keep their magnitude from layer to layer. device: where
    numbers are drawn, also those that go to host memory.

    Norms get ones, biases zeros, matrices independent values of variance 1 / inputs; quantized ones are random bytes.
    """
    generator = torch.Generator(device).manual_seed(seed)
    listed = list(parameters)
    integers = {parameter.name for parameter in listed if parameter.place.dtype == torch.int8}
    code_inputs = {each.name: 2 * each.shape[-1] for each in listed if each.place.dtype == torch.uint8}
    for parameter in listed:
        name, inputs = parameter.name, parameter.shape[-1]
        elsewhere = parameter.place.device.type != device.type
        place = torch.empty_like(parameter.place, device=device) if elsewhere else parameter.place
        if place.dtype == torch.float8_e4m3fn:
            raw = place.view(torch.uint8)
            raw.random_(0, 256, generator=generator).bitwise_and_(BELOW_TWO)
        elif place.dtype == torch.uint8:
            place.random_(0, 256, generator=generator)
        elif name.endswith(GLOBAL_SCALE_SUFFIX):
            # Scales of its groups are random bytes too.
            place.fill_(code_inputs[name.removesuffix(GLOBAL_SCALE_SUFFIX)] ** -0.5 / (CODE_RMS * BYTE_RMS))
        elif place.dtype == torch.int8:
            _fill_integers(place, generator)
        elif name.endswith(SCALE_SUFFIX):
            # A scale a block or group of 128 inputs.
            quantized_rms = INTEGER_RMS if name.removesuffix(SCALE_SUFFIX) in integers else BYTE_RMS
            place.fill_((128 * inputs) ** -0.5 / quantized_rms)
        elif name.endswith(INPUT_SCALE):
            place.fill_(LARGEST_INPUT / torch.finfo(torch.float8_e4m3fn).max)
        elif place.dim() == 1:
            place.fill_(1.0 if name.endswith(("norm.weight", PRE_SCALE)) else 0.0)
        else:
            place.normal_(0.0, inputs**-0.5, generator=generator)
        if elsewhere:
            parameter.place.copy_(place)


def _fill_integers(place: torch.Tensor, generator: torch.Generator) -> None:
    """Two weights of -7 to 7 a byte. A drawn -8, which no quantizer writes, becomes 0."""
    raw = place.view(torch.uint8)
    raw.random_(0, 256, generator=generator)
    for half in (0x0F, 0xF0):
        lowest = half & 0x88
        raw.bitwise_xor_(((raw & half) == lowest).to(torch.uint8) * lowest)

"""Random weights for measurements, drawn on the device: hundreds of gigabytes a second on a GPU."""

from collections.abc import Iterable

import torch

from engine.model.parameters import Parameter
from engine.weights.stored import GLOBAL_SCALE_SUFFIX, GROUP_SCALE_SUFFIX, INPUT_SCALE, PRE_SCALE, SCALE_SUFFIX

# Clears the highest bit of an e4m3 exponent: any byte becomes a number below 2, and none NaN.
BELOW_TWO = 0xBF
# Root mean square of what is left of a random byte.
BYTE_RMS = 0.62
# Root mean square of a random e2m1 code's value.
CODE_RMS = 2.93
# Root mean square of a random INT4 weight.
INTEGER_RMS = 4.18
# The largest magnitude that an expert's input is taken to have.
LARGEST_INPUT = 8.0
EMBEDDING = "embed_tokens.weight"


def fill_randomly(parameters: Iterable[Parameter], device: torch.device, seed: int = 0) -> None:
    """Fill parameters so that activations keep their magnitude from layer to layer; scales are listed with what they
    scale. device: of the places.

    Norms get ones, biases zeros, matrices independent values of variance 1 / inputs; quantized ones are random bytes.
    An embedding's values have variance 1, as activations do. With less, what attention adds, which all tokens of a
    prompt have in common, makes tokens alike, and they choose the same experts.
    """
    generator = torch.Generator(device).manual_seed(seed)
    listed = list(parameters)
    int4_inputs = {each.name: 2 * each.shape[-1] for each in listed if each.place.dtype == torch.int8}
    code_inputs = {each.name: 2 * each.shape[-1] for each in listed if each.place.dtype == torch.uint8}
    for parameter in listed:
        name, inputs, place = parameter.name, parameter.shape[-1], parameter.place
        if place.dtype == torch.float8_e4m3fn:
            place.view(torch.uint8).copy_(_bytes(place, generator).bitwise_and_(BELOW_TWO))
        elif place.dtype == torch.uint8:
            place.copy_(_bytes(place, generator))
        elif name.endswith(GLOBAL_SCALE_SUFFIX):
            # The scales of its groups are random bytes too.
            place.fill_(code_inputs[name.removesuffix(GLOBAL_SCALE_SUFFIX)] ** -0.5 / (CODE_RMS * BYTE_RMS))
        elif place.dtype == torch.int8:
            place.copy_(_integers(_bytes(place, generator)))
        elif (scaled := name.removesuffix(SCALE_SUFFIX).removesuffix(GROUP_SCALE_SUFFIX)) in int4_inputs:
            place.fill_(int4_inputs[scaled] ** -0.5 / INTEGER_RMS)
        elif name.endswith(SCALE_SUFFIX):
            # A scale a block of 128 inputs.
            place.fill_((128 * inputs) ** -0.5 / BYTE_RMS)
        elif name.endswith(INPUT_SCALE):
            place.fill_(LARGEST_INPUT / torch.finfo(torch.float8_e4m3fn).max)
        elif place.dim() == 1:
            place.fill_(1.0 if name.endswith(("norm.weight", PRE_SCALE)) else 0.0)
        elif name.endswith(EMBEDDING):
            place.normal_(generator=generator)
        else:
            place.normal_(0.0, inputs**-0.5, generator=generator)


def _bytes(place: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random bytes in the place's shape, in contiguous memory: places often lie in many pieces, where each operation
    takes far longer.
    """
    raw = torch.empty(place.shape, dtype=torch.uint8, device=place.device)
    return raw.random_(0, 256, generator=generator)


def _integers(raw: torch.Tensor) -> torch.Tensor:
    """Two weights of -7 to 7 a byte, int8. A drawn -8, which no quantizer writes, becomes 0."""
    # Bits 3 and 7 of a sum are set if the three bits below are not all zero; else the sign is cleared.
    signs = (raw & 0x77).add_(0x77).bitwise_and_(0x88)
    return raw.bitwise_and_(signs.bitwise_or_(0x77)).view(torch.int8)

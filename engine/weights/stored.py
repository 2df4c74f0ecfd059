"""How a checkpoint's quantized tensors belong together, and what they mean."""

import re
from collections.abc import Iterator

from engine.weights.shards import Entry, Shards
from kernels.block_quant import BLOCK
from kernels.group_quant import GROUP
from mesh.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"
PRE_SCALE = "pre_quant_scale"
INPUT_SCALE = "input_scale"
# Buffers that older tools saved and that the configuration determines.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_EXPERT_INPUT = re.compile(r"\.experts\.\d+\.w[123]\.input_scale$")


def is_fp8(entry: Entry) -> bool:
    return entry.dtype == "F8_E4M3"


def is_int4(entry: Entry) -> bool:
    """Two weights a byte."""
    return entry.dtype == "I8"


def matrix_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of the matrix of weights that the tensor holds."""
    return (*entry.shape[:-1], entry.shape[-1] * 2) if is_int4(entry) else entry.shape


def is_input_scale(name: str) -> bool:
    """Whether it scales an expert's activations: useless if these are not quantized."""
    return bool(_EXPERT_INPUT.search(name))


def is_derived(name: str) -> bool:
    """Whether the configuration determines its values."""
    return bool(_DERIVED.search(name))


def companions(shards: Shards, entry: Entry) -> Iterator[str]:
    """Names of the tensors without which a weight cannot be dequantized."""
    if is_fp8(entry) or is_int4(entry):
        yield entry.name + SCALE_SUFFIX
    if is_int4(entry) and (name := pre_scale_name(entry.name)) in shards.entries:
        yield name


def pre_scale_name(weight: str) -> str:
    """The name of AWQ's scale for a matrix's input; gate and up of all experts of a layer share one."""
    matrix = weight.removesuffix(".weight")
    layer, _, rest = matrix.rpartition(".experts.")
    return f"{matrix}.{PRE_SCALE}" if rest.endswith("down_proj") else f"{layer}.experts.{PRE_SCALE}"


def scale_of(shards: Shards, entry: Entry) -> Entry:
    """Scales of an FP8 or INT4 weight. Raises CheckpointError if they are missing or of another shape."""
    form = "FP8" if is_fp8(entry) else "INT4"
    scale = shards.entries.get(entry.name + SCALE_SUFFIX)
    if scale is None:
        raise CheckpointError(f"{entry.name} is {form} but the checkpoint lacks {entry.name}{SCALE_SUFFIX}")
    rows, columns = matrix_shape(entry)
    if is_int4(entry):
        expected, unit = (rows, columns // GROUP), f"groups of {GROUP} inputs"
    else:
        expected, unit = (-(-rows // BLOCK), -(-columns // BLOCK)), f"blocks of {BLOCK}x{BLOCK}"
    if scale.shape != expected:
        raise CheckpointError(
            f"{scale.name} in {scale.path} has shape {list(scale.shape)}; {unit} make it {list(expected)}"
        )
    return scale

"""How a checkpoint's quantized tensors belong together, and what they mean."""

import math
import re
from collections.abc import Iterator

from engine.weights.headers import Entry
from engine.weights.packed import PER_ITEM
from engine.weights.shards import Shards
from kernels.block_quant import BLOCK
from kernels.group_quant import GROUP
from kernels.nvfp4_quant import GROUP as NVFP4_GROUP
from mesh.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"
# NVFP4 has a scale for each group, and one for the whole matrix.
GROUP_SCALE_SUFFIX, GLOBAL_SCALE_SUFFIX = "_scale", "_scale_2"
PRE_SCALE = "pre_quant_scale"
INPUT_SCALE = "input_scale"
# Buffers that older tools saved and that the configuration determines.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_EXPERT_INPUT = re.compile(r"\.experts\.\d+\.w[123]\.input_scale$")
# Scales of NVFP4's activations, which stay in bfloat16 here.
_LINEAR_INPUT = re.compile(r"_proj\.input_scale$")
# ModelOpt's scales of keys and values in e4m3, such as those of `model.layers.0` and, for MTP, of `model.decoder`. Here
# all latents have one scale, `engine.kv_scale`: normalized as they are, they fit e4m3 without other scales.
_KV_SCALE = re.compile(r"\.self_attn\.(k_proj|v_proj|attn_mqa)\.[kv]_scale$")


def is_fp8(entry: Entry) -> bool:
    """Whether it is a matrix in FP8; scales of NVFP4 are e4m3 too."""
    return entry.dtype == "F8_E4M3" and not entry.name.endswith(GROUP_SCALE_SUFFIX)


def is_int4(entry: Entry) -> bool:
    """Whether it is a matrix in INT4, two weights a byte."""
    return entry.dtype == "I8"


def is_nvfp4(entry: Entry) -> bool:
    """Whether it is a matrix in NVFP4, two weights a byte."""
    return entry.dtype == "U8"


def is_packed(entry: Entry) -> bool:
    """Whether it is a matrix in INT4 as another tool packs it."""
    return entry.packing is not None


def is_quantized(entry: Entry) -> bool:
    return is_fp8(entry) or is_int4(entry) or is_nvfp4(entry) or is_packed(entry)


def matrix_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of the matrix of weights that the tensor holds."""
    if entry.packing is not None:
        return entry.packing.matrix_shape(entry.shape)
    return (*entry.shape[:-1], entry.shape[-1] * 2) if is_int4(entry) or is_nvfp4(entry) else entry.shape


def is_input_scale(name: str) -> bool:
    """Whether it scales an expert's activations: useless if these are not quantized."""
    return bool(_EXPERT_INPUT.search(name))


def is_unused(name: str) -> bool:
    """Whether nothing here reads it: the configuration determines its values, or no activations are quantized by it."""
    return any(pattern.search(name) for pattern in (_DERIVED, _EXPERT_INPUT, _LINEAR_INPUT, _KV_SCALE))


def companions(shards: Shards, entry: Entry) -> Iterator[str]:
    """Names of the tensors without which a weight cannot be dequantized, and of those that come with them unread."""
    if entry.packing is not None:
        module = entry.name.removesuffix(".weight")
        yield from entry.packing.companions(module)
        yield from (name for each in entry.packing.unread if (name := f"{module}.{each}") in shards.entries)
    elif is_nvfp4(entry):
        yield entry.name + GROUP_SCALE_SUFFIX
        yield entry.name + GLOBAL_SCALE_SUFFIX
    elif is_quantized(entry):
        yield entry.name + SCALE_SUFFIX
    if is_int4(entry) and (name := pre_scale_name(entry.name)) in shards.entries:
        yield name


def pre_scale_name(weight: str) -> str:
    """The name of AWQ's scale for a matrix's input; gate and up of all experts of a layer share one."""
    matrix = weight.removesuffix(".weight")
    layer, _, rest = matrix.rpartition(".experts.")
    return f"{matrix}.{PRE_SCALE}" if rest.endswith("down_proj") else f"{layer}.experts.{PRE_SCALE}"


def scale_of(shards: Shards, entry: Entry) -> Entry:
    """A quantized weight's scales of blocks or groups. Raises CheckpointError if they are missing or misshapen."""
    rows, columns = matrix_shape(entry)
    suffix = SCALE_SUFFIX
    if is_nvfp4(entry):
        form, suffix = "NVFP4", GROUP_SCALE_SUFFIX
        expected, unit = (rows, columns // NVFP4_GROUP), f"groups of {NVFP4_GROUP} inputs"
    elif is_int4(entry):
        form, expected, unit = "INT4", (rows, columns // GROUP), f"groups of {GROUP} inputs"
    else:
        form, expected, unit = "FP8", (-(-rows // BLOCK), -(-columns // BLOCK)), f"blocks of {BLOCK}x{BLOCK}"
    scale = shards.entries.get(entry.name + suffix)
    if scale is None:
        raise CheckpointError(f"{entry.name} is {form} but the checkpoint lacks {entry.name}{suffix}")
    if scale.shape != expected:
        raise CheckpointError(
            f"{scale.name} in {scale.path} has shape {list(scale.shape)}; {unit} make it {list(expected)}"
        )
    return scale


def global_scale_of(shards: Shards, entry: Entry) -> Entry:
    """The scale of a whole NVFP4 matrix. Raises CheckpointError if it is missing or not one number."""
    name = entry.name + GLOBAL_SCALE_SUFFIX
    scale = shards.entries.get(name)
    if scale is None:
        raise CheckpointError(f"{entry.name} is NVFP4 but the checkpoint lacks {name}")
    if math.prod(scale.shape) != 1:
        raise CheckpointError(f"{name} in {scale.path} has shape {list(scale.shape)}: expected one number")
    return scale


def packed_parts(shards: Shards, entry: Entry) -> list[Entry]:
    """The scales of a packed matrix, and its zero points if it has some. Raises CheckpointError if they are missing or
    misshapen.
    """
    assert entry.packing is not None
    outputs, inputs = matrix_shape(entry)
    found = []
    for name in entry.packing.companions(entry.name.removesuffix(".weight")):
        if name not in shards.entries:
            raise CheckpointError(f"{entry.name} is INT4 of {entry.packing.tool} but the checkpoint lacks {name}")
        found.append(shards.entries[name])
    groups = found[0].shape[-1 if entry.packing.zeros is None else 0]
    fitting = [(outputs, groups)] if entry.packing.zeros is None else [(groups, outputs), (groups, outputs // PER_ITEM)]
    for part, shape in zip(found, fitting, strict=True):
        if part.shape != shape or groups == 0 or inputs % groups:
            raise CheckpointError(
                f"{part.name} in {part.path} has shape {list(part.shape)}, which does not fit {outputs} outputs and"
                f" {inputs} inputs"
            )
    return found

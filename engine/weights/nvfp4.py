"""Which layers of a checkpoint are in NVFP4, by the dtypes of their tensors; its lists of exceptions are patterns."""

import re
from collections import defaultdict

from engine.model.quantization import LinearKind, Quantization, Stored
from engine.weights.shards import Shards
from engine.weights.stored import is_nvfp4
from mesh.errors import CheckpointError

_KINDS = {
    "self_attn.q_proj": LinearKind.INPUT,
    "self_attn.q_a_proj": LinearKind.INPUT,
    "self_attn.kv_a_proj_with_mqa": LinearKind.INPUT,
    "self_attn.q_b_proj": LinearKind.QUERY,
    "self_attn.o_proj": LinearKind.OUTPUT,
}
_WEIGHT = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_PROJECTION = re.compile(r"mlp\.(shared_experts\.)?(gate|up|down)_proj")
_EXPERTS = "mlp.experts."


def nvfp4_layers(shards: Shards, layers: range) -> Quantization:
    """What is in NVFP4 in these decoder layers.

    Raises CheckpointError if some layers of a kind are in NVFP4 and others are not.
    """
    # By kind: an example of a matrix in NVFP4 (True), and of one that is not (False).
    linear: dict[LinearKind, dict[bool, str]] = defaultdict(dict)
    experts: dict[bool, str] = {}
    for name, entry in shards.entries.items():
        match = _WEIGHT.fullmatch(name)
        if match is None or int(match[1]) not in layers:
            continue
        kind = linear_kind(name)
        if match[2].startswith(_EXPERTS):
            experts.setdefault(is_nvfp4(entry), name)
        elif kind is not None:
            linear[kind].setdefault(is_nvfp4(entry), name)
    for examples in (experts, *linear.values()):
        if len(examples) > 1:
            raise CheckpointError(
                f"{examples[True]} is NVFP4 and {examples[False]} is not: layers of a kind must be alike"
            )
    return Quantization(
        experts=Stored.NVFP4 if True in experts else Stored.PLAIN,
        nvfp4=frozenset(kind for kind, examples in linear.items() if True in examples),
    )


def linear_kind(name: str) -> LinearKind | None:
    """The kind of a decoder layer's matrix; None for what is always plain, and for routed experts. name: of its tensor
    in the checkpoint.
    """
    match = _WEIGHT.fullmatch(name)
    if match is None:
        return None
    return LinearKind.FEED_FORWARD if _PROJECTION.fullmatch(match[2]) else _KINDS.get(match[2])

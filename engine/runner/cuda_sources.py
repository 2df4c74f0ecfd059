"""Which CUDA sources a model's steps launch on Hopper, so that they are compiled while weights are read.

Adapters decide it launch by launch, by shapes. This only has to be about right: what it lacks is compiled when it is
first launched, and what it has too many of has cost some idle cores.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from engine.model.config import ModelConfig
from engine.model.quantization import WEIGHT_GROUP, Stored
from engine.settings.device import ResolvedEngineConfig
from kernels import __file__ as package
from kernels.act_quant.quantized import cuda_macros
from kernels.hopper import is_hopper
from kernels.mla_decode import FEW_HEADS
from kernels.mla_prefill.sources import MASKED, SOURCES

ALWAYS = (
    "linear/few_tokens",
    "mla_decode/combine",
    "mla_decode/parts",
    "mla_projections/few_tokens",
    "mla_projections/pieces",
    "moe_gate/choice",
    "norm/clusters",
)
# Those that have code to quantize activations, which is another where scales are powers of two.
QUANTIZING = (
    "mla_prefill/bf16_prefill",
    "mla_prefill/bf16_prefill_192",
    "mla_prefill/bf16_prefill_256",
    "mla_prefill/fp8_prefill",
    "mla_prefill/masked_prefill",
    "mla_prefill/masked_prefill_256",
    "mla_projections/few_tokens",
    "mla_projections/pieces",
    "norm/clusters",
    "peer_exchange/norm",
    "sparse_prefill/bf16_sparse_prefill",
    "swiglu/bf16",
)
ONE_BYTE = "float8_e4m3fn"


def compile_sources(model: ModelConfig, resolved: ResolvedEngineConfig) -> None:
    """Begin to compile what a model on a GPU needs, if the GPU is a Hopper."""
    if is_hopper():
        # Imported only here: it needs CUDA's bindings.
        from kernels.nvrtc import compile_ahead

        device, needed = torch.cuda.current_device(), needed_sources(model, resolved)
        compile_ahead(needed, device)
        if model.quantization.kept(resolved.weights).power_scales:
            quantizing = set(_sources(QUANTIZING))
            compile_ahead([source for source in needed if source in quantizing], device, cuda_macros(powers=True))


# The widest rows that `kernels.norm.multiplied` takes.
MOST_NORMALIZED = 2048


def needed_sources(model: ModelConfig, resolved: ResolvedEngineConfig) -> list[Path]:
    """model: as its config.json describes it. Without any if it computes in another dtype than bfloat16."""
    if resolved.dtype != "bfloat16":
        return []
    names = [*ALWAYS, *_attention(model, resolved), *_products(model, resolved)]
    if resolved.config.parallel.ranks_a_host > 1:
        names += ["peer_exchange/gather", "peer_exchange/norm", "peer_exchange/reduce"]
    return _sources(names)


def _sources(names: Iterable[str]) -> list[Path]:
    folder = Path(package).parent
    return [folder / operation / "cuda" / f"{stem}.cu" for operation, stem in (name.split("/") for name in names)]


def _attention(model: ModelConfig, resolved: ResolvedEngineConfig) -> Iterator[str]:
    kind = "fp8" if resolved.kv_dtype == ONE_BYTE else "bf16"
    if model.indexer is None:
        yield f"mla_decode/{kind}_decode"
        if kind == "bf16" and model.num_attention_heads <= FEW_HEADS:
            yield from ("mla_decode/few_heads", "mla_decode/few_heads_parts")
    else:
        # Prompts may attend in FP8 where steps that decode do not.
        kinds = {kind, "fp8" if resolved.prompt_attention_dtype == ONE_BYTE else kind}
        yield from (f"mla_selected/{each}_selected" for each in sorted(kinds))
        yield from ("index_keys/rows", "index_scores/scores")
        yield from ("index_scores/prompt_scores", "top_tokens/choice", "top_tokens/short_rows")
    widths = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    if widths in SOURCES:
        yield f"mla_prefill/{SOURCES[widths].path.stem}"
    if model.indexer is not None and widths in MASKED:
        yield from ("mla_prefill/mask_words", f"mla_prefill/{MASKED[widths].path.stem}")
    if resolved.prompt_attention_dtype == ONE_BYTE:
        yield from ("mla_prefill/fp8_prefill", "mla_prefill/fp8_quantize")
    if resolved.config.sparse_prefill.offered is not None:
        yield "sparse_prefill/bf16_sparse_prefill"


def _products(model: ModelConfig, resolved: ResolvedEngineConfig) -> Iterator[str]:
    kept = model.quantization.kept(resolved.weights)
    if Stored.FP8 in (kept.linear, kept.experts):
        yield from ("fp8_gemm/few_rows", "fp8_gemm/many_rows", "swiglu/bf16")
    if kept.linear is Stored.PLAIN:
        yield from ("linear/clusters", "linear/one_row")
    if kept.linear in (Stored.PLAIN, Stored.FP8):
        yield "linear/row_products"
        if model.hidden_size <= MOST_NORMALIZED:
            yield "norm/multiplied"
    if kept.experts is Stored.INT4:
        whole = kept.group == WEIGHT_GROUP
        yield from ("w4a8_gemm/few_tokens", "w4a8_gemm/w4a8") if whole else ("w4a8_gemm/w4a8_groups_of_32",)
    if kept.experts is Stored.PLAIN:
        yield from ("grouped_gemm/many_rows", "moe_gate/placed")
    if kept.experts is Stored.NVFP4:
        yield "nvfp4_gemm/nvfp4"

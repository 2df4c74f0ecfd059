"""Settles what is "auto" by the device alone, in the rank. Pure."""

from dataclasses import dataclass
from typing import Literal

from engine.config import EngineConfig
from mesh.errors import ConfigError

# The limit of kernels.peer_exchange.
MOST_GPU_RANKS = 8


@dataclass(frozen=True)
class Hardware:
    """What `resolve` may know of the machine."""

    cuda_devices: int
    free_memory_bytes: int


@dataclass(frozen=True)
class ResolvedEngineConfig:
    """An EngineConfig with nothing left to decide."""

    config: EngineConfig
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    kv_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"]
    prompt_attention_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"]
    # How the pool keeps index keys, if the model has indexers: in e4m3 with scales, as published, on a GPU.
    index_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"]
    weights: Literal["quantized", "dequantized", "fp8", "w4a8"]
    decode_graphs: bool
    warm_up: bool
    kv_memory_fraction: float


def kept_weights(
    config: EngineConfig, device: Literal["cpu", "cuda"]
) -> Literal["quantized", "dequantized", "fp8", "w4a8"]:
    """`weights`, settled for a device."""
    if config.weights != "auto":
        return config.weights
    return "quantized" if device == "cuda" and _dtype(config, device) == "bfloat16" else "dequantized"


def _dtype(config: EngineConfig, device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16"]:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if device == "cuda" else "float32"


def resolve(config: EngineConfig, hardware: Hardware) -> ResolvedEngineConfig:
    """Settle "auto": a GPU if there is one, with bfloat16; else the CPU with float32 (exact, and faster there).

    Raises ConfigError if a GPU is asked for and there is none, if there are GPUs but fewer than ranks, or if quantized
    weights are to be multiplied in another dtype than bfloat16.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if hardware.cuda_devices else "cpu"
    if device == "cuda" and not hardware.cuda_devices:
        raise ConfigError("engine.device=cuda, and torch finds no GPU: install its CUDA build, or leave device to auto")
    ranks = config.parallel.ranks_a_host
    if device == "cuda" and ranks > hardware.cuda_devices:
        raise ConfigError(
            f"engine.parallel makes {ranks} ranks, each on a GPU of its own, and torch finds"
            f" {hardware.cuda_devices}: lower tp, dp or ranks, or set engine.device=cpu"
        )
    if device == "cuda" and ranks > MOST_GPU_RANKS:
        raise ConfigError(
            f"engine.parallel makes {ranks} ranks: at most {MOST_GPU_RANKS} GPUs exchange tensors with"
            " each other; serve with more workers of fewer ranks"
        )
    dtype = _dtype(config, device)
    weights = kept_weights(config, device)
    if weights != "dequantized" and dtype != "bfloat16":
        raise ConfigError(f"engine.weights={weights} computes in bfloat16: set engine.dtype=bfloat16")
    if weights in ("fp8", "w4a8") and config.offload.layers:
        raise ConfigError(f"engine.weights={weights} excludes engine.offload: quantize the checkpoint first")
    return ResolvedEngineConfig(
        config=config,
        device=device,
        dtype=dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        prompt_attention_dtype=dtype if config.prompt_attention_dtype == "auto" else config.prompt_attention_dtype,
        index_dtype="float8_e4m3fn" if device == "cuda" else dtype,
        weights=weights,
        decode_graphs=device == "cuda" and config.decode_graphs == "auto",
        warm_up=device == "cuda" and config.warm_up == "auto",
        kv_memory_fraction=config.kv_memory_fraction or (0.95 if device == "cuda" else 0.25),
    )

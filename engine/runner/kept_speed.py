"""A worker's speed from earlier starts with the same model, card, layout and version, kept in the user's cache."""

import hashlib
import json
import os
from pathlib import Path

import msgspec
import torch

from engine.config import ResolvedEngineConfig
from engine.model.config import ModelConfig
from kernels.cache_files import package_version, read_cached, write_cached
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import WorkerSpeed


def speed_file(folder: Path, model: ModelConfig, namespace: KvNamespace, resolved: ResolvedEngineConfig) -> Path:
    """Named by all that the speed depends on."""
    config = resolved.config
    told = [
        package_version(),
        torch.__version__,
        _card(resolved.device),
        repr(model),
        repr(namespace),
        resolved.dtype,
        resolved.weights,
        resolved.prompt_attention_dtype,
        config.query_weights,
        resolved.decode_graphs,
        config.rank_threads,
        config.max_requests,
        config.max_step_tokens,
        config.context_tokens,
        config.parallel.model_dump_json(),
        config.offload.model_dump_json(),
        config.drafts.model_dump_json(),
    ]
    return folder / f"speed-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]}.json"


def read_speed(file: Path) -> WorkerSpeed | None:
    """None if it is not known yet."""
    try:
        return msgspec.convert(read_cached(file), WorkerSpeed)
    except msgspec.ValidationError:
        return None


def keep_speed(file: Path, speed: WorkerSpeed) -> None:
    """Each of several ranks may write it: they measure together, and the last one's stays."""
    write_cached(file, msgspec.to_builtins(speed))


def _card(device: str) -> str:
    if device == "cuda":
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{card.name} {card.multi_processor_count}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model} {len(os.sched_getaffinity(0))}"

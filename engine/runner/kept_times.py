"""What earlier starts with the same model, card, layout and version measured, kept in the user's cache."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.backend import Backend
from engine.config import EngineConfig
from engine.drafts.depth_times import measure_depths
from engine.model.config import ModelConfig
from engine.pace.first_speed import measure_speed
from engine.pace.step_times import StepTimes
from engine.settings.device import ResolvedEngineConfig
from kernels.cache_files import package_version, read_cached, write_cached
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import WorkerSpeed
from mesh.observe.spans import span


@dataclass(frozen=True, slots=True)
class KnownTimes:
    # None if nothing is to be kept: then it is not measured.
    speed: WorkerSpeed | None
    # How long steps with drafts take; None if their number is fixed.
    steps: StepTimes | None = None


def known_times(
    backend: Backend,
    file: Path | None,
    config: EngineConfig,
    block: int,
    largest: Callable[[float], float],
    rank: int = 0,
) -> KnownTimes:
    """What the file has; otherwise what is measured now, for later starts too. All ranks of a worker call it at once.

    On a CPU others' load weighs more, and would stay, so steps with drafts are measured each time. file: None if
    nothing is to be kept; block, rank: see `engine.pace.timed_steps.decoding`; largest: of the numbers that all ranks
    pass.
    """
    if file is None:
        return KnownTimes(None, _measured_steps(backend, config, block, rank))
    known = read_times(file)
    # All ranks measure, or none does: some may have found what others have just written.
    if largest(float(known is None)) or known is None:
        with span("engine.measure_speed"):
            speed = measure_speed(backend, config, block, rank)
        known = KnownTimes(speed, _measured_steps(backend, config, block, rank) if backend.asynchronous else None)
        keep_times(file, known)
    if backend.asynchronous:
        return known
    return KnownTimes(known.speed, _measured_steps(backend, config, block, rank))


def _measured_steps(backend: Backend, config: EngineConfig, block: int, rank: int) -> StepTimes | None:
    if config.drafts.next_n != "auto":
        return None
    with span("engine.measure_drafts"):
        return measure_depths(backend, config.max_requests, config.drafts.most, block, rank)


def times_file(folder: Path, model: ModelConfig, namespace: KvNamespace, resolved: ResolvedEngineConfig) -> Path:
    """Named by all that the times depend on."""
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
    return folder / f"times-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]}.json"


def read_times(file: Path) -> KnownTimes | None:
    """None if they are not known yet."""
    try:
        return msgspec.convert(read_cached(file), KnownTimes)
    except msgspec.ValidationError:
        return None


def keep_times(file: Path, times: KnownTimes) -> None:
    """Each of several ranks may write it: they measure together, and the last one's stays."""
    write_cached(file, msgspec.to_builtins(times))


def _card(device: str) -> str:
    if device == "cuda":
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{card.name} {card.multi_processor_count}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model} {len(os.sched_getaffinity(0))}"

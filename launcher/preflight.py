"""Checks made before any process starts."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from engine.config import EngineConfig
from engine.model.config import read_model_config
from engine.model.quantization import PACKED_NEEDS
from engine.model.share import check_division
from engine.settings.device import kept_weights
from engine.weights.headers import language_model, read_header, shard_files, weight_map
from launcher.plan import HOST, MeshPlan, ServiceSpec
from mesh.addresses import with_port
from mesh.errors import CheckpointError, ConfigError
from mesh.ports import why_not
from mesh.text.tokenizer_file import TOKENIZER_FILE, count_tokens, tokenizer_path

# The package that carries KV between processes.
TRANSPORT = "ucxx"
LFS_POINTER = b"version https://git-lfs"
# With SERVICE.engine.random_weights=true that service's workers draw weights, for measurements.
RANDOM_WEIGHTS = "engine.random_weights=true"


def check_plan(plan: MeshPlan) -> None:
    """Raises ConfigError for a port that is taken, CheckpointError for an incomplete model."""
    if plan.model_dir is not None:
        drawn = all(f"{role}.{RANDOM_WEIGHTS}" in plan.settings for role in _roles(plan))
        check_model_dir(plan.model_dir, weights=not drawn)
    check_transfers(plan)
    gateways = [
        (flag, plan.host, port)
        for ports in plan.gateway_ports
        for flag, port in zip(("--http-port", "--grpc-port"), ports, strict=True)
    ]
    check_ports([*gateways, ("--scheduler-port", HOST, plan.scheduler_port)])


def check_metrics_ports(specs: Sequence[ServiceSpec]) -> None:
    """Raises ConfigError for a fixed port that is taken."""
    for spec in specs:
        if spec.metrics_port and (why := why_not(HOST, spec.metrics_port)) is not None:
            raise ConfigError(
                f"cannot serve the metrics of {spec.name} on {HOST}:{spec.metrics_port} ({why}): "
                "choose other ports with --metrics-port, or 0 for free ones"
            )


def check_transfers(plan: MeshPlan) -> None:
    """Raises ConfigError if the plan moves KV and the package that carries it is missing."""
    if (plan.prefill_workers or plan.store_ports) and find_spec(TRANSPORT) is None:
        raise ConfigError(f"--prefill and --kvstore need the package {TRANSPORT}: install deepmesh's requirements")


def check_ports(listeners: Sequence[tuple[str, str, int]]) -> None:
    """Raises ConfigError for ports that are taken or given twice. `listeners`: flag, host and port of each."""
    flags, hosts, ports = zip(*listeners, strict=True)
    if len(set(ports)) < len(ports):
        raise ConfigError(f"{', '.join(dict.fromkeys(flags))}: give different ports")
    for host in dict.fromkeys(hosts):
        if (why := why_not(host, 0)) is not None:
            raise ConfigError(f"cannot listen on {host} ({why}): choose another with --host")
    # All at once: a mesh that runs already has most of them.
    refused = [
        (f"{with_port(host, port)} ({why})", flag)
        for flag, host, port in listeners
        if (why := why_not(host, port)) is not None
    ]
    if refused:
        places, by = (", ".join(dict.fromkeys(texts)) for texts in zip(*refused, strict=True))
        raise ConfigError(f"cannot listen on {places}: choose {'another' if len(refused) == 1 else 'others'} with {by}")


def _roles(plan: MeshPlan) -> tuple[str, ...]:
    return ("decode", "prefill") if plan.prefill_workers else ("decode",)


def check_model_dir(directory: Path, *, weights: bool = True) -> None:
    """Raises CheckpointError for a model that is not served, or if files are missing, unreadable or truncated, and
    ConfigError for a tokenizer that is damaged or another model's. Without `weights` the files of the weights are not
    looked at. The worker that loads them checks whether they have the model's tensors.
    """
    config = read_model_config(directory)
    vocabulary = tokenizer_path(directory) or directory / TOKENIZER_FILE
    shards = shard_files(weight_map(directory)) if weights else []
    needed = [vocabulary.name, *shards]
    if missing := [name for name in needed if not (directory / name).is_file()]:
        others = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory} is no complete checkpoint: {missing[0]}{others} missing")
    if pointers := [name for name in needed if _is_pointer(directory / name)]:
        raise CheckpointError(
            f"{directory / pointers[0]} is a pointer of Git LFS in place of the file: run git lfs pull in {directory}"
        )
    if (tokens := count_tokens(directory)) > config.vocab_size:
        raise ConfigError(
            f"{directory / vocabulary.name} has {tokens:,} tokens and the model {config.vocab_size:,}: it is the "
            "tokenizer of another model, copy the one that was published with this model"
        )
    language_model({name: each for shard in shards for name, each in read_header(directory / shard).items()}, directory)


def _is_pointer(path: Path) -> bool:
    """Whether it is what a clone without Git LFS leaves in place of a large file. Raises CheckpointError if it cannot
    be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def check_kept_weights(spec: ServiceSpec, engine: EngineConfig) -> None:
    """Raises ConfigError for a checkpoint whose weights this worker could not keep, or divide among its ranks, as it is
    configured, and CheckpointError for one that is not served.
    """
    if engine.model_dir is None:
        return
    config = read_model_config(engine.model_dir)
    if config.quantization.packed and kept_weights(engine, "cpu" if spec.gpu is None else "cuda") == "quantized":
        raise ConfigError(f"{spec.name}: {PACKED_NEEDS}")
    try:
        check_division(config, engine.parallel.tp or 1, blocks=False)
    except ConfigError as error:
        raise ConfigError(f"{spec.name}: {error.message}") from error

"""Finds wrong settings before any process starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cli.settings.services import MODELS
from decode_svc.config import DecodeConfig
from gateway.config import GatewayConfig
from launcher.memory import check_machine_room, check_room
from launcher.plan import MODULES, ServiceSpec
from launcher.preflight import check_kept_weights
from mesh.config import ServiceConfig
from mesh.config_values import load
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError
from prefill_svc.config import PrefillConfig

# Keys of `engine` that decide, with its checkpoint, what a worker's KV means to others.
KV_KEYS = ("kv_dtype", "kv_scale", "kv_namespace")


def gateway_config(configs: Mapping[str, ServiceConfig]) -> GatewayConfig:
    """The gateway's configuration in the result of `check_settings`."""
    config = configs["gateway"]
    assert isinstance(config, GatewayConfig)
    return config


def check_settings(specs: Sequence[ServiceSpec]) -> dict[str, ServiceConfig]:
    """Each service's configuration, by its name. Raises ConfigError for the first service that would not start with it,
    and for prefill workers whose KV no decode worker could take.
    """
    services = {module: service for service, module in MODULES.items()}
    configs = {spec.name: load(MODELS[services[spec.module]], None, spec.settings, origin=spec.name) for spec in specs}
    for prefill in (config for config in configs.values() if isinstance(config, PrefillConfig)):
        for decode in (config for config in configs.values() if isinstance(config, DecodeConfig)):
            _check_shared_kv(prefill, decode)
    return configs


def check_weights(specs: Sequence[ServiceSpec], configs: Mapping[str, ServiceConfig]) -> None:
    """Refuse a checkpoint that workers could not keep as they are configured: a rank takes seconds to find that. Raises
    ConfigError, CheckpointError.

    configs: the result of `check_settings`.
    """
    for spec in specs:
        config = configs[spec.name]
        if isinstance(config, PrefillConfig | DecodeConfig):
            check_kept_weights(spec, config.engine)


def check_memory(specs: Sequence[ServiceSpec], configs: Mapping[str, ServiceConfig]) -> None:
    """Refuse a model or settings that a worker's GPUs, or the machine, have no room for: loading it takes minutes.
    Raises ConfigError in a sentence with what fits.

    configs: the result of `check_settings`.
    """
    engines = []
    for spec in specs:
        config = configs[spec.name]
        if isinstance(config, PrefillConfig | DecodeConfig):
            engines.append(config.engine)
            role = WorkerRole.PREFILL if isinstance(config, PrefillConfig) else WorkerRole.DECODE
            check_room(spec, config.engine, role)
    check_machine_room(engines)


def _check_shared_kv(prefill: PrefillConfig, decode: DecodeConfig) -> None:
    """Refuse KV settings that differ. Otherwise decode workers would silently compute all prompts, since they never
    take KV with another meaning.
    """
    for key in KV_KEYS:
        computed, taken = getattr(prefill.engine, key), getattr(decode.engine, key)
        if computed != taken:
            raise ConfigError(
                f"prefill.engine.{key}={computed} and decode.engine.{key}={taken}: decode workers could not read the KV"
                " of the prefill workers, which would have nothing to do; set both alike"
            )


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    """Whether the gateway requires API keys, and one key that it accepts: None if it requires none, or knows only
    digests.
    """

    wanted: bool
    written: str | None


def gateway_keys(config: GatewayConfig) -> GatewayKeys:
    written = (each.key.get_secret_value() for each in config.api_keys if each.key is not None)
    return GatewayKeys(bool(config.api_keys), next(written, None))

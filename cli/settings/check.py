"""Finds wrong settings before any process starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cli.launcher.plan import MODULES, ServiceSpec
from cli.settings.services import MODELS
from gateway.config import GatewayConfig
from mesh.config import ServiceConfig, load


def gateway_config(configs: Mapping[str, ServiceConfig]) -> GatewayConfig:
    """The one of `check_settings`' result that is the gateway's."""
    config = configs["gateway"]
    assert isinstance(config, GatewayConfig)
    return config


def check_settings(specs: Sequence[ServiceSpec]) -> dict[str, ServiceConfig]:
    """Each service's configuration, by its name. Raises ConfigError for the first that would not start with it."""
    services = {module: service for service, module in MODULES.items()}
    return {spec.name: load(MODELS[services[spec.module]], None, spec.settings, origin=spec.name) for spec in specs}


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    """Whether the gateway wants keys, and one that it takes: None if it wants none, or is told only digests."""

    wanted: bool
    written: str | None


def gateway_keys(config: GatewayConfig) -> GatewayKeys:
    written = (each.key.get_secret_value() for each in config.api_keys if each.key is not None)
    return GatewayKeys(bool(config.api_keys), next(written, None))

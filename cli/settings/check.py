"""Finds wrong settings before any process starts."""

from collections.abc import Sequence

from cli.launcher.composition import MODULES, ServiceSpec
from cli.settings.services import MODELS
from mesh.config import load


def check_settings(specs: Sequence[ServiceSpec]) -> None:
    """Raises ConfigError for the first service whose settings it would not start with."""
    services = {module: service for service, module in MODULES.items()}
    for spec in specs:
        load(MODELS[services[spec.module]], None, spec.settings, origin=spec.name)

"""The configurations that are shipped start the services that they are for."""

from pathlib import Path

import pytest

from cli.settings.services import MODELS
from mesh.config_values import load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["configs", "deploy/compose"])
@pytest.mark.parametrize("service", MODELS)
def test_a_shipped_configuration_is_valid(folder: str, service: str) -> None:
    path = ROOT / folder / f"{service}.yaml"
    # The image names the model on the command line.
    overrides = ["engine.backend=oracle"] if service in ("prefill", "decode") else []
    load(MODELS[service], path, overrides)

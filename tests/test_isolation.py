"""No test may reach what it did not start: a mesh that happens to run on this machine stays alone."""

import re
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from decode_svc.config import DecodeConfig
from gateway.config import GatewayConfig
from kvstore.config import KvStoreConfig
from mesh.config import Config
from mesh.config_values import load
from mesh.errors import ConfigError
from prefill_svc.config import PrefillConfig
from scheduler.config import SchedulerConfig
from tests.support.addresses import NOWHERE
from tests.support.programs import run_program

ADDRESS = re.compile(r"[\w.\-]+:\d+")
CONFIGS = [DecodeConfig, GatewayConfig, PrefillConfig, SchedulerConfig, KvStoreConfig]
WORKERS = [(DecodeConfig, "engine.backend=oracle"), (PrefillConfig, "engine={backend: oracle, transfer: {}}")]


def defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every key of a configuration that has a default, with it."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from defaults(field.annotation, f"{prefix}{name}.")
        if not field.is_required():
            yield prefix + name, field.get_default(call_default_factory=True)


@pytest.mark.parametrize("config", CONFIGS)
def test_no_service_calls_an_address_that_nobody_gave_it(config: type[BaseModel]) -> None:
    found = [key for key, value in defaults(config) if ADDRESS.search(str(value)) and not isinstance(value, BaseModel)]
    assert found == []


@pytest.mark.parametrize(("config", "setting"), [*WORKERS, (GatewayConfig, "limits.unread_tokens=5")])
def test_a_service_without_its_scheduler_is_refused(config: type[Config], setting: str) -> None:
    with pytest.raises(ConfigError, match="missing key scheduler: expected text"):
        load(config, None, [setting])


async def test_a_command_without_an_address_finds_no_mesh() -> None:
    program = "import sys; sys.argv = ['deepmesh', 'status']; from cli.main import main; main()"
    status, _, stderr = await run_program(program)
    assert (status, NOWHERE in stderr) == (1, True), stderr

"""Writes the keys of the services' own configuration into the schema of the chart's values: `make chart-schema`."""

import json
import re
from pathlib import Path
from typing import Any

from decode_svc.config import DecodeConfig
from gateway.config import GatewayConfig
from kvstore.config import KvStoreConfig
from mesh.config import Config
from prefill_svc.config import PrefillConfig
from scheduler.config import SchedulerConfig

SCHEMA = Path(__file__).parent / "deepmesh/values.schema.json"
CONFIGS: tuple[type[Config], ...] = (SchedulerConfig, GatewayConfig, PrefillConfig, DecodeConfig, KvStoreConfig)
# Keys that the chart sets itself, because other objects of the chart must agree with them.
SET_BY_CHART = ("scheduler", "stores", "security", "gateway_id", "store_id", "worker_id")
SERVER_SET_BY_CHART = ("host", "port", "advertise", "metrics_host", "metrics_port", "health_port", "drain_seconds")
# Parts of a schema that are left out: texts, defaults, and required keys, since the chart may give only some keys.
_LEFT_OUT = ("title", "description", "default", "required")
# Keys that come from a Secret, and the models that have them.
SECRET_KEYS = ("secret", "accepted_secrets")
SECRET_IN_A_SECRET = (
    "GatewayConfig.ResumeConfig",
    "PrefillConfig.KvAuthenticityConfig",
    "DecodeConfig.KvAuthenticityConfig",
)


def schema() -> dict[str, Any]:
    """The schema as committed, with each service's keys as they are now."""
    kept: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    definitions: dict[str, Any] = {}
    for config in CONFIGS:
        ours = _partial(config.model_json_schema(ref_template=f"#/$defs/{config.__name__}.{{model}}"))
        for name, inner in ours.pop("$defs", {}).items():
            definitions[f"{config.__name__}.{name}"] = inner
        _drop(ours, SET_BY_CHART)
        server = type(config.model_fields["server"].default)
        _drop(definitions[f"{config.__name__}.{server.__name__}"], SERVER_SET_BY_CHART)
        definitions[config.__name__] = ours
    for name in unused(definitions):
        del definitions[name]
    # Secrets' keys are laid over the configuration in values.yaml, which must not have them.
    for name in SECRET_IN_A_SECRET:
        _drop(definitions[name], SECRET_KEYS)
    return {**kept, "$defs": dict(sorted(definitions.items()))}


def unused(definitions: dict[str, Any]) -> set[str]:
    """Models that only internal keys have."""
    named = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(definitions)))
    return definitions.keys() - named - {config.__name__ for config in CONFIGS}


def text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


def _drop(model: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        model["properties"].pop(key, None)


def _is_internal(key: Any) -> bool:
    """Whether the key is marked `mesh.config.INTERNAL`."""
    return isinstance(key, dict) and bool(key.get("internal"))


def _partial(model: Any, names_of_keys: bool = False) -> Any:
    """A schema without texts, required keys and internal keys. names_of_keys: whether the mapping's keys are names of
    properties or definitions rather than keywords of a schema.
    """
    if isinstance(model, list):
        return [_partial(each) for each in model]
    if not isinstance(model, dict):
        return model
    return {
        key: _partial(value, key in ("properties", "$defs") and not names_of_keys)
        for key, value in model.items()
        if (not _is_internal(value) if names_of_keys else key not in _LEFT_OUT)
    }


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")

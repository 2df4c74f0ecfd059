"""The configuration model of each service that `deepmesh up` starts."""

from collections.abc import Mapping

from decode_svc.config import DecodeConfig
from gateway.config import GatewayConfig
from kvstore.config import KvStoreConfig
from launcher.plan import MODULES
from mesh.config import ServiceConfig
from prefill_svc.config import PrefillConfig
from scheduler.config import SchedulerConfig

WORKERS: Mapping[str, type[PrefillConfig | DecodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
# By the service's name in `--set SERVICE.KEY=VALUE`.
MODELS: Mapping[str, type[ServiceConfig]] = {
    "scheduler": SchedulerConfig,
    "kvstore": KvStoreConfig,
    **WORKERS,
    "gateway": GatewayConfig,
}
assert MODELS.keys() == MODULES.keys()

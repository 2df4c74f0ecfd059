"""Puts every process of a mesh at its own site of a `network`, so that the network between them can fail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from launcher.plan import HOST, MODULES, WORKER_MODULES, ServiceSpec
from tests.support.network import Network

# The port of all workers, since a plan gives them none and each has an address of its own.
WORKER_PORT = 7000


@dataclass(frozen=True)
class SeparatedSpec(ServiceSpec):
    """A process whose command is preceded by other words, such as those that put it at a site."""

    prefix: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        return [*self.prefix, *super().command(port)]


def separated(network: Network, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
    """The processes of a plan, each moved to the site of its name."""
    addresses = {f"{HOST}:{spec.port}": f"{network.address(spec.name)}:{spec.port}" for spec in specs if spec.port}
    return [_at_its_site(network, spec, addresses) for spec in specs]


def _at_its_site(network: Network, spec: ServiceSpec, addresses: Mapping[str, str]) -> SeparatedSpec:
    address = network.address(spec.name)
    settings = [_readdressed(each, addresses) for each in spec.settings]
    ours = {
        "port": spec.port or WORKER_PORT,
        "host": address,
        "settings": (*settings, *_own_settings(spec.module, address)),
        "prefix": tuple(network.inside(spec.name)),
    }
    return SeparatedSpec(**{each.name: getattr(spec, each.name) for each in fields(spec)} | ours)


def _readdressed(setting: str, addresses: Mapping[str, str]) -> str:
    for before, after in addresses.items():
        setting = setting.replace(before, after)
    return setting


def _own_settings(module: str, address: str) -> list[str]:
    settings = [f"server.host={address}", "security.plaintext=true"]
    if module == MODULES["gateway"]:
        settings.append(f"http.host={address}")
    # All processes are on one machine and would otherwise move KV through its memory.
    if module == MODULES["kvstore"]:
        settings.append("transfer.transports=tcp")
    if module in WORKER_MODULES:
        settings.append("engine.transfer.transports=tcp")
    return settings

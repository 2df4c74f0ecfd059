"""A network of namespaces, one for each site, joined by a bridge. Its links are really cut, slowed or made lossy.

Needs root, `ip`, `tc` and `nft`. Not every kernel can delay packets (netem); therefore `delayed_link` does.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support import delayed_link

TOOLS = ("ip", "tc", "nft")
# The site of the process that made the network: the test with its clients.
CLIENTS = "clients"
_RULES = """
add table bridge faults
add chain bridge faults forward {{ type filter hook forward priority 0; }}
flush chain bridge faults forward
{rules}
"""


def why_no_network() -> str | None:
    """Why this machine cannot have such a network; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else None


class Network:
    """Made by `network`. Each site has a namespace with one device, eth0, whose other end is a port of the bridge."""

    def __init__(self, sites: Sequence[str]) -> None:
        number = os.getpid()
        self._prefix = f"dm{number}"
        self._subnet = f"10.{128 + (number >> 8) % 100}.{number % 256}"
        self._fabric = f"{self._prefix}-fabric"
        self._sites = {CLIENTS: 1, **{name: place for place, name in enumerate(sites, 2)}}
        self._drops: list[str] = []
        self._relays: dict[str, subprocess.Popen[bytes]] = {}
        self._slow: list[str] = []

    def address(self, site: str) -> str:
        return f"{self._subnet}.{self._sites[site]}"

    def inside(self, site: str) -> list[str]:
        """The words to put before a command so that it runs at this site."""
        return [] if site == CLIENTS else ["ip", "netns", "exec", self._namespace(site)]

    def cut(self, source: str, target: str | None = None) -> None:
        """Drop all that `source` sends to `target`, or to any site if None."""
        self._drop(f"{_from(source)} {_to(target)}", "drop")

    def cut_towards(self, target: str) -> None:
        """Drop all that is sent to `target`."""
        self._drop(_to(target), "drop")

    def lose(self, site: str, percent: int) -> None:
        """Drop this share of the packets that `site` sends or receives, drawn at random."""
        for way in (_from(site), _to(site)):
            self._drop(way, f"numgen random mod 100 < {percent} drop")

    def limit(self, site: str, megabits: int) -> None:
        """Limit the rate at which `site` sends, and that at which it receives."""
        shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "32kb", "latency", "400ms"]
        _run("ip", "netns", "exec", self._fabric, "tc", "qdisc", "replace", "dev", _port(site), *shape)
        _run(*self.inside(site), "tc", "qdisc", "replace", "dev", "eth0", *shape)
        self._slow.append(site)

    def delay(self, site: str, seconds: float) -> None:
        """Lengthen the round trip to and from `site` by this many seconds, half of it each way."""
        port, bridged = _port(site), _delayed_port(site)
        self._ip("link", "add", "relay", "type", "veth", "peer", "name", bridged)
        self._ip("link", "set", port, "nomaster")
        self._ip("link", "set", bridged, "master", "bridge", "up")
        self._ip("link", "set", "relay", "up")
        command = [sys.executable, delayed_link.__file__, port, "relay", str(seconds / 2)]
        self._relays[site] = subprocess.Popen(["ip", "netns", "exec", self._fabric, *command])

    def heal(self) -> None:
        """End all cuts, losses and limits."""
        self._drops.clear()
        self._apply_drops()
        for site in self._slow:
            _run("ip", "netns", "exec", self._fabric, "tc", "qdisc", "del", "dev", _port(site), "root")
            _run(*self.inside(site), "tc", "qdisc", "del", "dev", "eth0", "root")
        self._slow.clear()
        for site in list(self._relays):
            self._end_relay(site)
            self._ip("link", "del", "relay")
            self._ip("link", "set", _port(site), "master", "bridge")

    def make(self) -> None:
        _run("ip", "netns", "add", self._fabric)
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")
        for site in self._sites:
            self._add_site(site)
        self._apply_drops()

    def remove(self) -> None:
        """Remove the network. No process may run at any site."""
        for site in list(self._relays):
            self._end_relay(site)
        # If `make` failed, some parts do not exist. A namespace's own devices vanish some time after it.
        _try("ip", "link", "del", self._prefix)
        for site in (*self._sites, "fabric"):
            _try("ip", "netns", "del", self._namespace(site))

    def _add_site(self, site: str) -> None:
        device, port = (self._prefix, _port(site)) if site == CLIENTS else ("eth0", _port(site))
        inside: list[str] = []
        if site != CLIENTS:
            inside = ["-n", self._namespace(site)]
            _run("ip", "netns", "add", self._namespace(site))
            _run("ip", *inside, "link", "set", "lo", "up")
        _run("ip", *inside, "link", "add", device, "type", "veth", "peer", "name", port, "netns", self._fabric)
        _run("ip", *inside, "addr", "add", f"{self.address(site)}/24", "dev", device)
        _run("ip", *inside, "link", "set", device, "up")
        self._ip("link", "set", port, "master", "bridge", "up")

    def _drop(self, which: str, what: str) -> None:
        self._drops.append(f"add rule bridge faults forward {which} {what}")
        self._apply_drops()

    def _apply_drops(self) -> None:
        """Replace all rules in one transaction."""
        rules = _RULES.format(rules="\n".join(self._drops))
        command = ["ip", "netns", "exec", self._fabric, "nft", "-f", "-"]
        subprocess.run(command, input=rules.encode(), check=True)

    def _end_relay(self, site: str) -> None:
        relay = self._relays.pop(site)
        relay.terminate()
        relay.wait()

    def _ip(self, *arguments: str) -> None:
        _run("ip", "-n", self._fabric, *arguments)

    def _namespace(self, site: str) -> str:
        return f"{self._prefix}-{site}"


@contextmanager
def network(sites: Sequence[str]) -> Iterator[Network]:
    made = Network(sites)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _port(site: str) -> str:
    return f"p-{site}"


def _delayed_port(site: str) -> str:
    return f"d-{site}"


def _from(site: str) -> str:
    return f'iifname "{_port(site)}"'


def _to(site: str | None) -> str:
    return "" if site is None else f'oifname "{_port(site)}"'


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _try(*command: str) -> None:
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)

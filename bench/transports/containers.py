"""Puts a process into namespaces of its own, as a container runtime does. Needs root."""

import ctypes
import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# sched.h, sys/mount.h and sys/prctl.h.
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_PID, NEW_NETWORK = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_NO_DEVICES, _BIND, _RECURSIVE, _PRIVATE = 0x4, 0x1000, 0x4000, 0x40000
_SIGNAL_AT_PARENTS_END = 1
# What container runtimes give.
SHM_BYTES = 64 << 20


@dataclass(frozen=True)
class Container:
    """What a process has for itself; all else it shares with the process that starts it. `enter` can be pickled."""

    name: str
    ipc: bool = False
    pid: bool = False
    shm: bool = False
    # A network namespace that exists.
    network: str | None = None
    # Number of the only GPU whose device it may open.
    gpu: str | None = None

    def enter(self) -> None:
        """Called by a process that has one thread. What comes after this call may run in a child of it."""
        if self.network is not None:
            with open(f"/run/netns/{self.network}", encoding="ascii") as namespace:
                _check(_libc().setns(namespace.fileno(), NEW_NETWORK))
        _check(_libc().unshare(NEW_MOUNTS | NEW_UTS | NEW_IPC * self.ipc | NEW_PID * self.pid))
        socket.sethostname(self.name)
        _mount(None, "/", None, _RECURSIVE | _PRIVATE)
        if self.shm:
            _mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={SHM_BYTES}")
        if self.gpu is not None:
            _deny_gpus_but(f"/dev/nvidia{self.gpu}")
        if self.pid:
            _become_first_process()


def why_no_containers(networks: bool = True) -> str | None:
    """Why this machine cannot have such processes; None if it can. networks: whether with networks of their own."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if networks and shutil.which("ip") is None:
        return "network namespaces need ip"
    command = ["unshare", "--mount", "--ipc", "--pid", "--fork", "true"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    return (ended.stderr.strip() or f"unshare ended with {ended.returncode}") if ended.returncode else None


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable, with nothing else in them."""
    prefix = f"dm{os.getpid()}"
    names = f"{prefix}-a", f"{prefix}-b"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)


def _deny_gpus_but(own: str) -> None:
    """Put nodes of the same devices over the others, on a file system that opens none."""
    _mount("tmpfs", "/mnt", "tmpfs", _NO_DEVICES)
    for device in map(str, Path("/dev").glob("nvidia[0-9]*")):
        if device != own:
            denied = f"/mnt/{Path(device).name}"
            os.mknod(denied, 0o666 | stat.S_IFCHR, os.stat(device).st_rdev)
            _mount(denied, device, None, _BIND)


def _become_first_process() -> None:
    """Go on as the first process of the new PID namespace, with a /proc of its own."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    _check(_libc().prctl(_SIGNAL_AT_PARENTS_END, signal.SIGKILL))
    _mount("proc", "/proc", "proc", 0)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if each is None else each.encode() for each in (source, target, kind, options)]
    _check(_libc().mount(*encoded[:3], flags, encoded[3]))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

"""On a machine whose memory has several nodes: which is nearest to a device, and memory that is taken from there."""

import ctypes
import os
import platform
from pathlib import Path

# From <linux/mempolicy.h>: other nodes give pages once this one has none.
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_WORD_BITS = 64


def node_of_device(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The node of a PCI device, whose address is as "0000:1b:00.0". None if the kernel names none, as on machines with
    one node.
    """
    try:
        node = int((devices / address.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(start: int, size_bytes: int, node: int) -> None:
    """Take the pages of this memory, which have not been touched yet, from `node` while it has some.

    start: the memory's address, a multiple of a page. Raises OSError if the kernel refuses: containers may need the
    right SYS_NICE.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"the number of mbind is not known on {platform.machine()}")
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    status = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(start),
        ctypes.c_ulong(size_bytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        bits,
        ctypes.c_ulong(0),
    )
    if status:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))

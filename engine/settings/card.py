"""The card that a rank computes on, and the cards that this process sees."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

_DRIVER = "libcuda.so.1"
_SUCCESS = 0
# CUdevice_attribute: major and minor compute capability.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 256


@dataclass(frozen=True)
class Card:
    """memory_bytes: what a process may allocate of it. capability: the compute capability, major and minor."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


def find_cards() -> tuple[Card, ...]:
    """The cards that processes started from here can use, in CUDA's order; none without a driver. Without torch.

    The driver respects CUDA_VISIBLE_DEVICES, and leaves out what a container hides.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return ()
    return tuple(_card(driver, number) for number in range(count.value))


def smallest(cards: Sequence[Card]) -> Card:
    """The one with the least memory: ranks of a worker have pools of one size."""
    return min(cards, key=lambda card: card.memory_bytes)


def _card(driver: ctypes.CDLL, number: int) -> Card:
    device, memory = ctypes.c_int(0), ctypes.c_size_t(0)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Card(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))

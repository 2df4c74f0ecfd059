"""Chooses the GPU that a rank computes on, before torch or the driver has looked at any."""

import os

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def take_gpu(rank: int, devices: int) -> None:
    """Make the GPU of that number this process's first.

    devices: how many there are. The others stay visible: a process has to see the GPU whose memory it maps.
    """
    os.environ[VISIBLE_DEVICES] = own_first(rank, devices, os.environ.get(VISIBLE_DEVICES))


def own_first(rank: int, devices: int, visible: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES; visible: what it was."""
    names = [str(index) for index in range(devices)] if visible is None else visible.split(",")[:devices]
    return ",".join(name.strip() for name in (*names[rank:], *names[:rank]))

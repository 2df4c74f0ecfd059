"""GHASH of pieces on a GPU: `cuda/pieces.cu`."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kernels.nvrtc import compile_ahead, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "pieces.cu"
Arguments = structure(SOURCE, "Arguments")
THREADS, POWERS, ENTRIES = 256, 9, 16


def prepare(device: torch.device) -> None:
    """Begin to compile, in another thread."""
    compile_ahead([SOURCE], device.index or 0)


def hash_pieces(planes: Sequence[torch.Tensor], pieces: torch.Tensor, keys: torch.Tensor, hashes: torch.Tensor) -> None:
    """As `kernels.ghash.hash_pieces`, on the current stream."""
    if not len(pieces):
        return
    device = planes[0].device
    tables = torch.empty((len(keys), POWERS, ENTRIES, 16), dtype=torch.uint8, device=device)
    arguments = Arguments(
        planes=tuple(plane.data_ptr() for plane in planes),
        units=tuple(plane.shape[2] // 16 for plane in planes),
        blocks=planes[0].shape[1], pieces=pieces.data_ptr(), keys=keys.data_ptr(), hashes=hashes.data_ptr(),
        tables=tables.data_ptr(),
    )  # fmt: skip
    load_kernel(SOURCE, "fill_tables", device.index or 0).launch((len(keys), 1, 1), 32, arguments)
    load_kernel(SOURCE, "hash_pieces", device.index or 0).launch((len(pieces), 1, 1), THREADS, arguments)

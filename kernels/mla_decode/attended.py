"""What decode attention leaves, which may still be in pieces."""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch


class Pieces(Protocol):
    """Requests that several multiprocessors attended to, each to a part of the context."""

    @property
    def work(self) -> ctypes.Structure:
        """`Work` of `cuda/parts.cuh`, which says where the pieces are."""
        ...

    def join(self) -> None:
        """Put these requests' latents where those of whole ones are. Called at most once."""
        ...


@dataclass(frozen=True, slots=True)
class Attended:
    # [tokens, heads, latent], contiguous. Undefined for requests in pieces.
    latents: torch.Tensor
    # None if no request can be in pieces.
    pieces: Pieces | None = None

    def joined(self) -> torch.Tensor:
        """The latents of all requests."""
        if self.pieces is not None:
            self.pieces.join()
        return self.latents

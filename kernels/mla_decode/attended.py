"""What decode attention leaves, which may still be in pieces."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class Pieces(Protocol):
    """Requests that several multiprocessors attended to, each to a part of the context."""

    def join(self) -> None:
        """Put these requests' latents where those of whole ones are. Called at most once."""
        ...


@dataclass(frozen=True, slots=True)
class EvenPieces:
    """Every token's context in equally many blocks a piece, as few blocks as give `splits` pieces at most."""

    # [tokens, heads, latent]: where the joined latents go.
    latents: torch.Tensor
    # [tokens * splits, heads, latent], undefined for pieces that a context does not have.
    values: torch.Tensor
    # [tokens * splits, heads] float32: base-2 logarithms of the pieces' weights.
    log_sums: torch.Tensor
    # [rows] int32: tokens of each row's context.
    lengths: torch.Tensor
    query_tokens: int
    splits: int

    def join(self) -> None:
        tokens, heads, latent = self.latents.shape
        shares = torch.softmax(self.log_sums.view(tokens, self.splits, heads, 1) * math.log(2.0), dim=1)
        values = self.values.view(tokens, self.splits, heads, latent).float()
        self.latents.copy_(torch.where(shares > 0, values * shares, 0.0).sum(1))


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

"""Configuration of how the ranks of a worker divide a model."""

from typing import Self

from pydantic import Field, model_validator

from mesh.config import Config


class ParallelConfig(Config):
    """A worker has tp * dp ranks, each a process of its own."""

    tp: int = Field(default=1, ge=1)
    """Ranks that compute a request together, each with some of the attention heads (tensor parallelism)."""
    dp: int = Field(default=1, ge=1)
    """Groups of tp ranks; each has requests and a KV pool of its own (data parallelism of attention)."""
    ep: int | None = Field(default=None, ge=1)
    """Parts into which the routed experts are divided (expert parallelism); ranks / ep ranks share a part, each with
    some of its width. By default one part a rank.
    """

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    @model_validator(mode="after")
    def _experts_are_divided_evenly(self) -> Self:
        if self.ep is not None and self.world % self.ep:
            raise ValueError(f"engine.parallel.ep={self.ep} does not divide the {self.world} ranks (tp * dp)")
        return self

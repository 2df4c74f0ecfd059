"""Samples of how much sparse attention keeps, while they are copied from the device."""

from collections import deque

import torch

from engine.requests.sparse_measure import SparseMeasure
from kernels.host_copy import HostCopies

# Queries of a chunk that are measured, spread evenly: together they cost as much as one block of exact attention.
MOST_SAMPLES = 16


class SparseMeter:
    """A chunk is measured in one layer, and which one changes from chunk to chunk. Layers write, the backend reads."""

    def __init__(self) -> None:
        self._copies: deque[HostCopies] = deque()

    def note(self, recall: torch.Tensor, density: torch.Tensor) -> None:
        """Both are tensors of one number."""
        self._copies.append(HostCopies((recall, density)))

    def drain(self) -> list[SparseMeasure]:
        """The samples that have reached the host since the last call. Does not wait."""
        measures = []
        while self._copies and self._copies[0].done:
            recall, density = self._copies.popleft().read()
            measures.append(SparseMeasure(float(recall), float(density)))
        return measures

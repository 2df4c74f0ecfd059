"""Captured graphs on a CPU: what they capture runs as it is, over the same tensors."""

from collections.abc import Callable

import pytest
import torch

from engine.runner import draft_graphs
from engine.runner.backend import ModelBackend
from engine.runner.draft_graphs import DraftGraphs


class EagerGraphs:
    """Graphs of drafting steps that a backend uses as it would use a GPU's.

    Attributes:
        runs: how many were run since a backend was given them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        monkeypatch.setattr(draft_graphs, "capture", self._capture)
        monkeypatch.setattr(draft_graphs, "graph_pool", lambda: None)

    def give_to(self, backend: ModelBackend, rows: list[int], drafts: int) -> None:
        """rows: sizes of the steps that are captured."""
        blocks = -(-backend.context_tokens // 64) + 1
        with torch.inference_mode():
            backend._draft_graphs = DraftGraphs(backend._model, backend.state, rows, [drafts], blocks)
        self.runs = 0

    def _capture(self, work: Callable[[], None], pool: None) -> Callable[[], None]:
        def run() -> None:
            self.runs += 1
            work()

        run()
        return run

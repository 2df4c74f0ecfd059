"""The time of drafting itself, with graphs that run on a CPU as they are."""

import time
from itertools import pairwise

import pytest

from bench.rank import draft_overhead
from bench.rank.draft_overhead import DraftOverhead, measure_overhead
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from launcher.shipped_model import shipped_model
from tests.support.checkpoints import model_backend
from tests.support.eager_graphs import EagerCapture


class HostClock:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter() * 1e6)

    def microseconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self._marks)]


def test_a_guess_is_compared_with_a_layer_and_the_head() -> None:
    assert DraftOverhead(1, 2, 600.0, 100.0, 150.0, 500.0).ratio == pytest.approx(1.2)


def test_drafting_takes_about_a_layer_and_the_head_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = EagerCapture()
    monkeypatch.setattr(draft_overhead, "DeviceClock", HostClock)
    drafts = DraftsConfig(next_n=2)
    backend = model_backend(shipped_model(), drafts=drafts, max_requests=4)
    config = EngineConfig(model_dir=shipped_model(), drafts=drafts, max_requests=4)
    found = measure_overhead(
        backend.weights, backend.state, config, requests=2, context=100, floor_us=1.0, capture=capture
    )
    assert (found.requests, found.drafts) == (2, 2)
    # Each graph is run once when it is captured.
    assert capture.runs == 2 * (1 + draft_overhead.WARM_REPEATS + draft_overhead.REPEATS)
    assert 0.3 < found.ratio < 5
    # Rows end in blocks of their own; a new graph is filled up with padding.
    written = (backend.state.kv_pool != 0).any(3).any(2).any(0).nonzero().flatten()
    assert written.tolist() == [1, 3, backend.state.padding_block]

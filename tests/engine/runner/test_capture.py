"""Captures on a stand-in for CUDA: how often work runs, and what is left if it fails."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.drafts.config import DraftsConfig
from engine.model.context import ForwardContext
from engine.model.layers import DecoderLayer
from engine.offload.host_pages import HostPages
from engine.runner.capture import CudaCapture, Pieces
from engine.runner.prompt_graphs import PromptGraphs
from engine.step.two_batch import NEVER
from tests.support.checkpoints import model_backend, tiny_checkpoint
from tests.support.eager_graphs import EagerCapture

LAYERS = 9


class Cuda:
    """Notes what is called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        note = self.calls.append

        class Graph:
            def capture_begin(self, pool: object, error_mode: str) -> None:
                note("begin")

            def capture_end(self) -> None:
                note("end")

            def replay(self) -> None:
                note("replay")

        fakes: dict[str, Callable[..., Any]] = {
            "CUDAGraph": Graph,
            "Stream": lambda **_: "stream",
            "stream": nullcontext,
            "graph_pool_handle": lambda: "pool",
            "empty_cache": lambda: note("empty"),
            "synchronize": lambda: note("wait"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr("engine.runner.capture.launcher", lambda graph: graph.replay)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_many_captures_give_memory_back_once_and_never_wait(cuda: Cuda) -> None:
    captured = CudaCapture()
    for _ in range(3):
        captured.whole(lambda: cuda.calls.append("work"))()
    assert cuda.calls == ["empty", *["begin", "work", "end", "replay"] * 3]


def in_pieces(captured: CudaCapture, work: Callable[[], None]) -> None:
    def cut_then_work(pieces: Pieces) -> None:
        pieces.cut(lambda context: None)
        work()

    captured.in_pieces(cut_then_work)


@pytest.mark.parametrize(
    ("begin", "calls"),
    [(CudaCapture.whole, ["begin", "end"]), (in_pieces, ["begin", "end", "begin", "end"])],
    ids=["whole", "pieces"],
)
def test_work_that_fails_leaves_no_capture_open(
    cuda: Cuda, begin: Callable[[CudaCapture, Callable[[], None]], object], calls: list[str]
) -> None:
    def lacks_memory() -> None:
        assert not gc.isenabled()
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        begin(CudaCapture(), lacks_memory)
    assert cuda.calls == ["empty", *calls] and gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "pieces"])
def test_other_threads_page_lock_memory_while_one_captures(in_pieces: bool) -> None:
    sums, locked = torch.zeros(4, device="cuda"), list[HostPages]()
    sums.add_(1)

    def work(pieces: Pieces | None = None) -> None:
        sums.add_(1)
        with ThreadPoolExecutor(1) as threads:
            locked.append(threads.submit(HostPages, 1 << 20, page_locked=True).result())
        sums.add_(1)

    if in_pieces:
        CudaCapture().in_pieces(work).run(cast(ForwardContext, None), None)
    else:
        CudaCapture().whole(work)()
    assert sums.tolist() == [3] * 4


class Runs:
    """Counts how often a layer is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        forward = DecoderLayer.forward

        def counted(layer: DecoderLayer, *arguments: Any) -> Any:
            self.count += 1
            return forward(layer, *arguments)

        monkeypatch.setattr(DecoderLayer, "forward", counted)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_captured_size_runs_few_layers_before(drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a captured step runs once more, where a GPU would launch its graph."""
    checkpoint = tiny_checkpoint(tmp_path, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    backend = model_backend(checkpoint, max_requests=4, drafts=DraftsConfig(next_n=drafts))
    few, runs = len(backend.weights.short().layers), Runs(monkeypatch)
    backend.steps.capture([1, 2, 4], backend.context_tokens, EagerCapture(), NEVER)
    drafting = 2 * drafts
    assert few < LAYERS and runs.count == 3 * (few + LAYERS + drafting)
    runs.count = 0
    with torch.inference_mode():
        PromptGraphs(backend.weights, backend.state, [16, 32], EagerCapture())
    assert runs.count == 2 * (few + LAYERS)

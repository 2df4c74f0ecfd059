"""Graphs of steps in two micro-batches against the same steps whole. One rank takes its own rows for all ranks'."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bench.node.muted import NoExchange
from engine.batch import Row
from engine.exchange.interface import Begun, ResultT
from engine.model.inputs import build_context
from engine.model.state import make_state
from engine.parallel.layout import Group, Layout, Place
from engine.runner.capture import CudaCapture
from engine.runner.graphs import DecodeGraphs
from engine.step.shape import shape_of
from engine.step.two_batch import ALWAYS
from engine.weights.loading import load_model
from tests.support.checkpoints import GREEDY, tiny_checkpoint
from tests.support.eager_graphs import EagerCapture
from tests.support.errors import relative_error

PLACE = Place(Layout(dp=2, ep=2), 0)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class NoExchangeOnAStream(NoExchange):
    """What is begun with `overlap` runs on a stream of its own on a GPU, as between ranks.

    Attributes:
        begun: how often that was.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(PLACE)
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.begun = 0

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        return self._begin(super().begin_all_gather, overlap, outputs, parts, group)

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        return self._begin(super().begin_reduce_scatter, overlap, values, group)

    def _begin(self, begin: Callable[..., Begun[ResultT]], overlap: bool, *given: object) -> Begun[ResultT]:
        self.begun += overlap
        if self._stream is None or not overlap:
            return begin(*given)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            made = begin(*given).finish()
        sent = self._stream.record_event()

        def collect() -> ResultT:
            torch.cuda.current_stream().wait_event(sent)
            return made

        return Begun(collect, given)


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str)
def test_a_graph_of_two_micro_batches_computes_whole_steps(device: torch.device, tmp_path: Path) -> None:
    exchange = NoExchangeOnAStream(device)
    model = load_model(tiny_checkpoint(tmp_path), torch.float32, device, exchange=exchange)
    state = make_state(model.config, device, blocks=8, positions=64, rows=8, kv_dtype=torch.float32)
    with torch.inference_mode():
        state.kv_pool.normal_()
        graphs = DecodeGraphs(model, state, [8], 1, EagerCapture() if device == CPU else CudaCapture(), ALWAYS)
        # Two halves of four rows; of the last one, some fill the graph up.
        for count in (8, 5, 7):
            rows = [Row([count * 8 + number], 20 + number, [number], GREEDY) for number in range(count)]
            found = graphs.run(rows, shape_of(rows))
            expected = model.forward(build_context(model.config, rows, state))
            assert relative_error(found.logits, expected) < 1e-4
            likeliest = expected.argmax(1)
            assert found.likeliest is not None and torch.equal(found.likeliest.on_device, likeliest)
            # Comparing has waited for the graph.
            assert torch.equal(found.likeliest.on_host, likeliest.cpu())
            assert torch.equal(state.drawn[:count], likeliest)
    assert exchange.begun

"""Compares what ranks on one host's GPUs exchange by DeepEP, as they would between hosts, with their own exchange."""

import itertools

import torch

from engine.exchange.peer import PeerExchange
from engine.model.activations import Sent
from engine.model.deep_ep import DeepEp, Traffic
from engine.model.deep_ep.elastic import ElasticBuffer
from engine.model.expert_group import ExpertGroup
from kernels.act_quant import Quantized, dequantize, quantize
from kernels.vendor import find_package
from tests.support.errors import relative_error

TRAFFIC = Traffic(hidden=1024, experts=32, choices=8, tokens=1024)
# As many tokens as a captured step has, and more than that, for which the host waits.
TOKENS, MANY_TOKENS = 40, 600
# Parts of a step, which travel at once.
PARTS = 2


# Rows, weights and choices.
Inputs = tuple[Sent, torch.Tensor, torch.Tensor]


class Senders:
    """A rank's two ways to send rows to the experts of all ranks."""

    def __init__(self, exchange: PeerExchange) -> None:
        place = exchange.place
        module = find_package("deep_ep", ["ElasticBuffer", "topk_idx_t"])
        assert module is not None
        self._own = TRAFFIC.experts // place.layout.world
        self._first = place.rank * self._own
        self.deep_ep = DeepEp(ElasticBuffer(module, exchange, TRAFFIC), module.topk_idx_t, self._first)
        self._group = ExpertGroup(exchange)

    def by_deep_ep(self, *inputs: Inputs) -> list[torch.Tensor]:
        """The sums of each of the inputs, all of which travel at once."""
        sent = [self.deep_ep.begin_dispatch(*each) for each in inputs]
        back = []
        for begun in sent:
            found, found_weights, numbers, way_back = begun.finish()
            back.append(self.deep_ep.begin_combine(self._outputs(found, found_weights, numbers), way_back))
        return [begun.finish() for begun in back]

    def by_exchange(self, rows: Sent, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        found, found_weights, numbers, _ = self._group.begin_dispatch(rows, weights, choices).finish()
        return self._group.sum_parts(self._outputs(found, found_weights, numbers))

    def _outputs(self, rows: Sent, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank's experts for the rows, if each expert multiplies a row by its number plus one."""
        assert isinstance(rows, torch.Tensor | Quantized)
        values = rows if isinstance(rows, torch.Tensor) else dequantize(rows)
        mine = (choices >= self._first) & (choices < self._first + self._own)
        factors = (weights * (choices + 1)).where(mine, 0).sum(1, keepdim=True)
        # Rows that no rank sent are garbage, perhaps NaN even after this product: no sum may read them.
        return (values.float() * factors).bfloat16()


def drawn(tokens: int, experts: range = range(TRAFFIC.experts)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights and choices; one row has no expert. experts: what the others choose from; empty for none."""
    choices = torch.full((tokens, TRAFFIC.choices), -1, device="cuda")
    if experts:
        choices = torch.rand(tokens, len(experts), device="cuda").topk(TRAFFIC.choices).indices + experts.start
    choices[tokens // 2] = -1
    rows = torch.randn(tokens, TRAFFIC.hidden, device="cuda").bfloat16()
    return rows, torch.rand(tokens, TRAFFIC.choices, device="cuda"), choices


def send_both_ways(exchange: PeerExchange) -> None:
    torch.manual_seed(exchange.place.rank)
    senders = Senders(exchange)
    half = TRAFFIC.experts // 2
    # Experts of all ranks, of one rank, as few as a row chooses, and none.
    routings = range(TRAFFIC.experts), range(half, 2 * half), range(TRAFFIC.choices), range(0)
    for tokens, experts in itertools.product((TOKENS, MANY_TOKENS), routings):
        for form in (torch.Tensor.clone, quantize):
            inputs = []
            for _ in range(PARTS):
                rows, weights, choices = drawn(tokens, experts)
                inputs.append((form(rows), weights, choices))
            for each, sums in zip(inputs, senders.by_deep_ep(*inputs), strict=True):
                _assert_near(sums, senders.by_exchange(*each))


def replay(exchange: PeerExchange) -> None:
    """Replay a captured exchange with inputs that change, so that the number of rows that arrive changes too."""
    torch.manual_seed(exchange.place.rank)
    senders = Senders(exchange)
    inputs = drawn(TOKENS)
    senders.by_deep_ep((quantize(inputs[0]), *inputs[1:]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = quantize(inputs[0])
        assert senders.deep_ep.takes(rows)
        [sums] = senders.by_deep_ep((rows, *inputs[1:]))
    for _ in range(5):
        for given, value in zip(inputs, drawn(TOKENS), strict=True):
            given.copy_(value)
        graph.replay()
        _assert_near(sums, senders.by_exchange(quantize(inputs[0]), *inputs[1:]))


def _assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow for rounding: both ways add the same bfloat16 parts, but in different orders."""
    assert found.shape == expected.shape and relative_error(found, expected) < 0.01

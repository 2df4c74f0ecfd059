"""`python -m bench.exchange.deep_ep [--ranks N]`: microseconds of rows to experts and sums back, by DeepEP's second
version and by this project, in CUDA graphs on the GPUs of one host. Without network cards it needs EP_DISABLE_GIN=1.
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from bench.exchange.cases import CHOICES, DISPATCHED_TOKENS
from bench.exchange.measure import CALLS
from bench.exchange.processes import on_each_gpu
from bench.kernels.deepseek_r1 import EXPERTS, HIDDEN
from bench.kernels.timing import time_graph
from engine.exchange.peer import PeerExchange
from engine.model.deep_ep import DeepEp, Traffic
from engine.model.deep_ep.elastic import MOST_WITHOUT_WAITING, ElasticBuffer
from engine.model.expert_group import ExpertGroup
from engine.parallel.layout import Layout
from kernels.act_quant import Quantized, quantize
from kernels.vendor import find_package

TOKENS = tuple(tokens for tokens in DISPATCHED_TOKENS if tokens <= MOST_WITHOUT_WAITING)
Drawn = tuple[Quantized, torch.Tensor, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    if find_package("deep_ep", ["ElasticBuffer"]) is None:
        parser.error("there is no deep_ep with an ElasticBuffer")
    by_rank = on_each_gpu(Layout(dp=ranks, ep=ranks), _measure)
    shown = Table(title=f"{ranks} GPUs, us in a graph: rows of {HIDDEN} in FP8 there, sums in bf16 back")
    for column in ("rows a rank, choices", "deepmesh there", "DeepEP there", "deepmesh both ways", "DeepEP both ways"):
        shown.add_column(column, justify="right")
    for name, found in by_rank[0].items():
        # Times of the slowest rank.
        shown.add_row(name, *(f"{1e6 * max(rank[name][index] for rank in by_rank):.1f}" for index in range(len(found))))
    Console(width=100).print(shown)


def _measure(exchange: PeerExchange) -> dict[str, list[float]]:
    """By case: seconds of this project and of DeepEP, there, then there and back."""
    place = exchange.place
    traffic = Traffic(HIDDEN, EXPERTS, CHOICES, max(TOKENS))
    module = find_package("deep_ep", ["ElasticBuffer", "topk_idx_t"])
    assert module is not None
    deep_ep = DeepEp(
        ElasticBuffer(module, exchange, traffic), module.topk_idx_t, place.rank * EXPERTS // place.layout.ep
    )
    experts = ExpertGroup(exchange)

    def ours(drawn: Drawn) -> torch.Tensor:
        rows = experts.begin_dispatch(*drawn).finish().rows
        assert isinstance(rows, Quantized)
        return rows.values

    def theirs(drawn: Drawn) -> torch.Tensor:
        return deep_ep.begin_dispatch(*drawn).finish()[1]

    def ours_and_back(drawn: Drawn) -> torch.Tensor:
        return experts.sum_parts(torch.empty(len(ours(drawn)), HIDDEN, dtype=torch.bfloat16, device="cuda"))

    def theirs_and_back(drawn: Drawn) -> torch.Tensor:
        rows, _, _, way_back = deep_ep.begin_dispatch(*drawn).finish()
        assert isinstance(rows, Quantized)
        sums = torch.empty(len(rows.values), HIDDEN, dtype=torch.bfloat16, device="cuda")
        return deep_ep.begin_combine(sums, way_back).finish()

    found: dict[str, list[float]] = {}
    for tokens in TOKENS:
        for name, own_experts in {"all experts": EXPERTS, "one rank's": EXPERTS // place.layout.ep}.items():
            calls = (ours, theirs, ours_and_back, theirs_and_back)
            found[f"{tokens}, {name}"] = [_seconds(call, tokens, own_experts) for call in calls]
    exchange.check()
    return found


def _seconds(call: Callable[[Drawn], torch.Tensor], tokens: int, experts: int) -> float:
    """experts: how many of them rows choose from, the first ones."""

    def drawn() -> Drawn:
        rows = quantize(torch.randn(tokens, HIDDEN, device="cuda").bfloat16())
        choices = torch.rand(tokens, experts, device="cuda").topk(CHOICES).indices
        return rows, torch.rand(tokens, CHOICES, device="cuda"), choices

    inputs = [drawn() for _ in range(CALLS)]
    return time_graph([lambda each=each: call(each) for each in inputs])  # type: ignore[misc]


if __name__ == "__main__":
    main()

"""What the ranks of a DeepSeek-R1 exchange in a layer, by this project and by NCCL."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import distributed

from bench.kernels.deepseek_r1 import EXPERT_WIDTH, HIDDEN
from engine.exchange.interface import RankExchange
from engine.model.expert_group import ExpertGroup
from engine.parallel.layout import Group
from kernels.act_quant import GROUP, quantize
from kernels.norm import add_rms_norm, add_rms_norm_in_both_forms
from kernels.peer_exchange.exchanged_norm import ExchangedNorm, SummedRows

CHOICES = 8
REDUCED_ROWS = (1, 16, 64, 128)
NORMALIZED_ROWS = (16, 64)
# Rows of a sum that every rank gets whole.
SUMMED_ROWS = (1, 4, 16, 32)
DISPATCHED_TOKENS = (32, 64, 128, 4096)
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    name: str
    # Bytes that a rank sends, and as many that it receives at the same time.
    wire_bytes: int
    # By the provider's name: a function that draws new inputs and returns the call to be timed.
    providers: dict[str, Callable[[], Call]]


def cases(exchange: RankExchange) -> Iterator[Case]:
    ranks = exchange.place.layout.world
    experts = ExpertGroup(exchange)
    for rows in REDUCED_ROWS:
        yield _all_reduce(exchange, rows, ranks)
    # Between hosts the norm is apart from its exchanges.
    one_host = exchange.place.layout.hosts == 1
    for rows in NORMALIZED_ROWS * one_host:
        yield _norm(exchange, rows, ranks)
    for rows in SUMMED_ROWS * one_host:
        yield _all_sum_norm(exchange, rows, ranks)
    for tokens in DISPATCHED_TOKENS:
        dispatch, combine = _dispatch(experts, tokens), _combine(experts, tokens)
        yield dispatch
        yield combine
        both = {name: _chained(dispatch.providers[name], combine.providers[name]) for name in dispatch.providers}
        yield Case(f"dispatch, combine {tokens}", dispatch.wire_bytes + combine.wire_bytes, both)
    yield _swap(exchange, ranks)


def _all_reduce(exchange: RankExchange, rows: int, ranks: int) -> Case:
    def ours() -> Call:
        values = _random(rows, HIDDEN)
        return lambda: exchange.all_reduce(values, Group.WORLD)

    def nccl() -> Call:
        values = _random(rows, HIDDEN)
        return lambda: distributed.all_reduce(values)

    return Case(f"all-reduce {rows}", 2 * (ranks - 1) * rows * HIDDEN * 2 // ranks, {"deepmesh": ours, "NCCL": nccl})


def _norm(exchange: RankExchange, rows: int, ranks: int) -> Case:
    """Sum, residual and norm of each rank's rows, then all rows to all ranks, in FP8 too.

    The peer is NCCL with our norm in between.
    """

    def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _random(rows, HIDDEN), _random(rows // ranks, HIDDEN), _random(HIDDEN)

    def ours() -> Call:
        parts, residual, weight = inputs()
        norm = ExchangedNorm(weight, 1e-6, SummedRows.OWN, rows, plain=True, quantizes=True)
        return lambda: exchange.add_rms_norm(parts, residual, norm, Group.WORLD)

    def nccl() -> Call:
        parts, residual, weight = inputs()
        own, gathered = torch.empty_like(residual), torch.empty_like(parts)

        def call() -> None:
            distributed.reduce_scatter_tensor(own, parts)
            distributed.all_gather_into_tensor(gathered, add_rms_norm(own, residual, weight, 1e-6))
            quantize(gathered)

        return call

    name = f"sum, norm, gather {rows}"
    return Case(name, 2 * (ranks - 1) * rows * HIDDEN * 2 // ranks, {"deepmesh": ours, "NCCL": nccl})


def _all_sum_norm(exchange: RankExchange, rows: int, ranks: int) -> Case:
    """The sum of all rows, residual and norm on every rank, in FP8 too. The peer is NCCL, followed by our norm."""

    def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _random(rows, HIDDEN), _random(rows, HIDDEN), _random(HIDDEN)

    def ours() -> Call:
        parts, residual, weight = inputs()
        norm = ExchangedNorm(weight, 1e-6, SummedRows.ALL, None, plain=True, quantizes=True)
        return lambda: exchange.add_rms_norm(parts, residual, norm, Group.WORLD)

    def nccl() -> Call:
        parts, residual, weight = inputs()

        def call() -> None:
            distributed.all_reduce(parts)
            add_rms_norm_in_both_forms(parts, residual, weight, 1e-6)

        return call

    wire_bytes = (ranks - 1) * rows * HIDDEN * 2
    return Case(f"sum of all, norm {rows}", wire_bytes, {"deepmesh": ours, "NCCL": nccl})


def _dispatch(experts: ExpertGroup, tokens: int) -> Case:
    """FP8 rows with scales, and the weights and choices of their experts."""
    row_bytes = HIDDEN + HIDDEN // GROUP * 4 + CHOICES * (4 + 8)

    def ours() -> Call:
        rows = quantize(_random(tokens, HIDDEN))
        weights = torch.rand(tokens, CHOICES, device="cuda")
        choices = torch.randint(256, (tokens, CHOICES), device="cuda")
        return lambda: experts.begin_dispatch(rows, weights, choices).finish()

    def nccl() -> Call:
        rows = torch.randint(256, (tokens, row_bytes), device="cuda", dtype=torch.uint8)
        gathered = rows.new_empty(experts.ranks * tokens, row_bytes)
        return lambda: distributed.all_gather_into_tensor(gathered, rows)

    return Case(f"dispatch {tokens}", (experts.ranks - 1) * tokens * row_bytes, {"deepmesh": ours, "NCCL": nccl})


def _combine(experts: ExpertGroup, tokens: int) -> Case:
    def ours() -> Call:
        sums = _random(experts.ranks * tokens, HIDDEN)
        return lambda: experts.sum_parts(sums)

    def nccl() -> Call:
        sums = _random(experts.ranks * tokens, HIDDEN)
        own = sums.new_empty(tokens, HIDDEN)
        return lambda: distributed.reduce_scatter_tensor(own, sums)

    return Case(f"combine {tokens}", (experts.ranks - 1) * tokens * HIDDEN * 2, {"deepmesh": ours, "NCCL": nccl})


def _swap(exchange: RankExchange, ranks: int) -> Case:
    """The first and the last rank swap an expert in INT4, with a scale of two bytes for 128 weights."""
    weights = 3 * HIDDEN * EXPERT_WIDTH
    size = weights // 2 + weights // 64
    sources = list(range(ranks))
    sources[0], sources[-1] = ranks - 1, 0
    source = sources[exchange.place.rank]

    def ours() -> Call:
        values = torch.randint(256, (size,), device="cuda", dtype=torch.uint8)
        return lambda: exchange.copy_between([values], Group.WORLD, sources)

    def nccl() -> Call:
        sizes = [size if rank == source != exchange.place.rank else 0 for rank in range(ranks)]
        given = torch.randint(256, (sum(sizes),), device="cuda", dtype=torch.uint8)
        received = torch.empty_like(given)
        return lambda: distributed.all_to_all_single(received, given, sizes, sizes)

    return Case("swap of an INT4 expert", size, {"deepmesh": ours, "NCCL": nccl})


def _chained(first: Callable[[], Call], second: Callable[[], Call]) -> Callable[[], Call]:
    def make() -> Call:
        earlier, later = first(), second()
        return lambda: (earlier(), later())

    return make


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()

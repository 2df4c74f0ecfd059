"""Operations of ranks on GPUs in tests of their exchange. Each rank checks its own results."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence

import torch

from engine.exchange.peer import PeerExchange
from engine.model.expert_group import ExpertGroup
from engine.parallel.layout import Group
from kernels.act_quant import Quantized, quantize
from kernels.moe_permute import NOWHERE, ExpertOutputs, combine
from kernels.norm import add_rms_norm, add_rms_norm_in_both_forms
from kernels.peer_exchange import reference
from kernels.peer_exchange.exchanged_norm import ExchangedNorm, SummedRows
from mesh.errors import RankLost
from tests.support.errors import relative_error

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float64)
SUMMED_DTYPES = (torch.bfloat16, torch.float32, torch.int64)
# Sizes around the limits between ways to send, in whole pieces and in odd ones.
WIDTHS = (1, 3, 8, 56, 1000, 7168)
ROWS = (0, 1, 2, 5, 33, 128, 700)
REPLAYED_ROWS = (1, 40, 300)
# Which rows are summed before a norm.
SUMS = (None, SummedRows.OWN, SummedRows.OWN, SummedRows.ALL)
# How many experts a token chooses.
CHOICES = 8
WAIT_SECONDS = 1.0
Operation = Callable[[PeerExchange, random.Random], None]


def exchange_at_random(exchange: PeerExchange, count: int = 150) -> None:
    """Run random operations. All ranks draw the same ones, and know each other's tensors."""
    drawn = random.Random(7)
    torch.set_deterministic_debug_mode("warn")
    operations: Sequence[Operation] = (
        gather,
        gather_into,
        gather_ones,
        scatter,
        reduce,
        broadcast,
        copy_between,
        dispatch,
        normalize,
        normalize_experts,
        meet,
    )
    for _ in range(count):
        drawn.choice(operations)(exchange, drawn)
        # Sometimes one rank is late.
        if drawn.random() < 0.3 and drawn.randrange(exchange.place.layout.world) == exchange.place.rank:
            torch.cuda._sleep(200_000)
    torch.set_deterministic_debug_mode("default")
    torch.cuda.synchronize()
    exchange.check()


def gather(exchange: PeerExchange, drawn: random.Random) -> None:
    group = _group(exchange, drawn)
    parts = _parts(exchange, group, _shape(drawn), drawn.choice(DTYPES), drawn)
    _assert_equal(exchange.all_gather(parts[_index(exchange, group)], group), reference.all_gather(parts))


def gather_into(exchange: PeerExchange, drawn: random.Random) -> None:
    group = _group(exchange, drawn)
    several = [_parts(exchange, group, _shape(drawn), drawn.choice(DTYPES), drawn) for _ in range(drawn.randint(1, 6))]
    expected = [reference.all_gather(parts) for parts in several]
    outputs = [torch.empty_like(each) for each in expected]
    given = [parts[_index(exchange, group)] for parts in several]
    begun = exchange.begin_all_gather(outputs, given, group, overlap=drawn.random() < 0.5)
    torch.cuda._sleep(drawn.choice((0, 100_000)))
    begun.finish()
    for output, each in zip(outputs, expected, strict=True):
        _assert_equal(output, each)


def gather_ones(exchange: PeerExchange, drawn: random.Random) -> None:
    """Gather tensors whose bits are all ones, since such bits mark places where nothing has arrived yet."""
    group = _group(exchange, drawn)
    rows, ranks = drawn.choice(ROWS), len(exchange.place.members(group))
    minus = torch.full((rows, 5), -1, device="cuda")
    bare = torch.full((rows, 24), 255, dtype=torch.uint8, device="cuda")
    _assert_equal(exchange.all_gather(minus, group), minus.repeat(ranks, 1))
    _assert_equal(exchange.all_gather(bare, group), bare.repeat(ranks, 1))
    for dtype in (torch.bfloat16, torch.float32):
        values = minus.view(dtype)
        assert exchange.all_gather(values, group).isnan().all() and exchange.all_reduce(values, group).isnan().all()


def scatter(exchange: PeerExchange, drawn: random.Random) -> None:
    group = _group(exchange, drawn)
    ranks, own = len(exchange.place.members(group)), _index(exchange, group)
    rows, width = _shape(drawn)
    values = _parts(exchange, group, (ranks * rows, width), drawn.choice(SUMMED_DTYPES), drawn)
    expected = reference.sum_in_order(values)[own * rows : (own + 1) * rows]
    begun = exchange.begin_reduce_scatter(values[own], group, overlap=drawn.random() < 0.5)
    torch.cuda._sleep(drawn.choice((0, 100_000)))
    _assert_equal(begun.finish(), expected)


def reduce(exchange: PeerExchange, drawn: random.Random) -> None:
    group = _group(exchange, drawn)
    values = _parts(exchange, group, _shape(drawn), drawn.choice(SUMMED_DTYPES), drawn)
    _assert_equal(exchange.all_reduce(values[_index(exchange, group)], group), reference.sum_in_order(values))


def broadcast(exchange: PeerExchange, drawn: random.Random) -> None:
    group = _group(exchange, drawn)
    values = _parts(exchange, group, _shape(drawn), drawn.choice(DTYPES), drawn)
    source = drawn.randrange(len(values))
    _assert_equal(exchange.broadcast(values[_index(exchange, group)], group, source), values[source])


def copy_between(exchange: PeerExchange, drawn: random.Random) -> None:
    """Each rank gets the tensors of a random rank: ranks swap, give to several, or keep their own."""
    group = _group(exchange, drawn)
    several = [_parts(exchange, group, _shape(drawn), drawn.choice(DTYPES), drawn) for _ in range(drawn.randint(1, 6))]
    ranks, own = len(exchange.place.members(group)), _index(exchange, group)
    sources = [drawn.randrange(ranks) for _ in range(ranks)]
    expected = [parts[sources[own]].clone() for parts in several]
    exchange.copy_between([parts[own] for parts in several], group, sources)
    for parts, each in zip(several, expected, strict=True):
        _assert_equal(parts[own], each)


def dispatch(exchange: PeerExchange, drawn: random.Random) -> None:
    tokens = drawn.choice(ROWS[1:])
    plain = _parts(exchange, Group.WORLD, (tokens, 1024), torch.bfloat16, drawn)
    weights = _parts(exchange, Group.WORLD, (tokens, 8), torch.float32, drawn)
    choices = _parts(exchange, Group.WORLD, (tokens, 8), torch.int64, drawn)
    own = exchange.place.rank
    begun = ExpertGroup(exchange).begin_dispatch(quantize(plain[own]), weights[own], choices[own])
    rows, *rest = begun.finish()[:3]
    expected = quantize(torch.cat(plain))
    assert isinstance(rows, Quantized)
    _assert_equal(rows.values.float(), expected.values.float())
    _assert_equal(rows.scales, expected.scales)
    for found, each in zip(rest, (weights, choices), strict=True):
        _assert_equal(found, torch.cat(each))


def normalize(exchange: PeerExchange, drawn: random.Random) -> None:
    """Compare a norm with the exchange before it, after it, or both, with separate kernels."""
    group = _group(exchange, drawn)
    ranks, own = len(exchange.place.members(group)), _index(exchange, group)
    rows, width, sums = drawn.choice((1, 2, 7, 32)), drawn.choice((1024, 7168)), drawn.choice(SUMS)
    all_rows = {
        None: ranks * rows,
        SummedRows.OWN: drawn.choice((None, ranks * rows - drawn.randrange(rows))),
        SummedRows.ALL: None,
    }[sums]
    given_rows = ranks * rows if sums is SummedRows.OWN else rows
    parts = [part.clone() for part in _parts(exchange, group, (given_rows, width), torch.bfloat16, drawn)]
    # If every rank has all rows, all ranks have the same residual.
    residuals = [(parts[0] if sums is SummedRows.ALL else part).flipud()[:rows].clone() for part in parts]
    weight = parts[0][0].clone()
    plain, values, scales = [], [], []
    total = reference.sum_in_order(parts)
    for rank, residual in enumerate(residuals):
        delta = {None: parts[rank], SummedRows.OWN: total[rank * rows :][:rows], SummedRows.ALL: total}[sums]
        normalized, quantized = add_rms_norm_in_both_forms(delta, kept := residual.clone(), weight, 1e-6)
        if rank == own:
            added = kept
        if all_rows is not None or rank == own:
            plain.append(normalized)
            values.append(quantized.values.float())
            scales.append(quantized.scales)
    norm = ExchangedNorm(weight, 1e-6, sums, all_rows, plain=drawn.choice((False, True)), quantizes=True)
    made = exchange.add_rms_norm(parts[own], residuals[own], norm, group)
    assert made is not None and made[1] is not None
    _assert_equal(residuals[own], added)
    count = len(made[1].values)
    assert count == (all_rows or rows) and (made[0] is not None) == norm.plain
    if made[0] is not None:
        _assert_equal(made[0], torch.cat(plain)[:count])
    _assert_equal(made[1].values.float(), torch.cat(values)[:count])
    _assert_equal(made[1].scales, torch.cat(scales)[:count])


def normalize_experts(exchange: PeerExchange, drawn: random.Random) -> None:
    """The outputs of each rank's experts for a few rows are added up on the way to a norm on all ranks."""
    group = _group(exchange, drawn)
    own, rows, width = _index(exchange, group), drawn.choice((1, 2, 7, 32)), drawn.choice((1024, 7168))
    made = [each.clone() for each in _parts(exchange, group, (CHOICES * rows, width), torch.bfloat16, drawn)]
    weights = _parts(exchange, group, (rows, CHOICES), torch.float32, drawn)
    shared, residual = (each.clone() for each in _parts(exchange, group, (rows, width), torch.bfloat16, drawn)[:2])
    weight = made[0][0].clone()
    outputs = []
    for rank in range(len(made)):
        places = [drawn.choice((NOWHERE, drawn.randrange(CHOICES * rows))) for _ in range(CHOICES * rows)]
        positions = torch.tensor(places, device="cuda").view(rows, CHOICES)
        outputs.append(ExpertOutputs(made[rank], positions, weights[rank].contiguous(), None if rank else shared))
    total = reference.sum_in_order([combine(each) for each in outputs])
    expected = add_rms_norm(total, added := residual.clone(), weight, 1e-6)
    norm = ExchangedNorm(weight, 1e-6, SummedRows.ALL, None, plain=True, quantizes=False)
    found = exchange.add_rms_norm(outputs[own], residual, norm, group)
    assert found is not None and found[0] is not None and found[1] is None
    # Sums of products may be rounded differently, but they are the same on all ranks.
    assert relative_error(found[0], expected) < 1e-2 and relative_error(residual, added) < 1e-2
    _assert_equal(exchange.all_gather(residual[None], group), residual.expand(len(made), *residual.shape))


def meet(exchange: PeerExchange, drawn: random.Random) -> None:
    exchange.barrier(_group(exchange, drawn))


def replay(exchange: PeerExchange, count: int = 300) -> None:
    """Replay a step's exchanges in a graph, with new inputs for each replay."""
    drawn = random.Random(11)
    for rows in REPLAYED_ROWS:
        inputs = [_parts(exchange, Group.WORLD, (rows, 7168), torch.bfloat16, drawn) for _ in range(4)]
        own = exchange.place.rank
        given = torch.empty_like(inputs[0][own])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            summed = exchange.all_reduce(given, Group.WORLD)
            gathered = exchange.all_gather(summed, Group.WORLD)
            scattered = exchange.begin_reduce_scatter(gathered, Group.WORLD, overlap=True).finish()
        sums = [reference.sum_in_order(parts) for parts in inputs]
        ranks = exchange.place.layout.world
        scatters = [reference.sum_in_order([each] * ranks) for each in sums]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(count):
            given.copy_(inputs[number % 4][own])
            summed.fill_(float("nan"))
            scattered.fill_(float("nan"))
            graph.replay()
            wrong += (summed != sums[number % 4]).sum() + (scattered != scatters[number % 4]).sum()
        assert int(wrong) == 0
    exchange.check()


def soak(exchange: PeerExchange, seconds: float) -> int:
    """Run and compare replays and random operations until `seconds` have passed; returns how many rounds.

    The first rank says after each minute how far it is.
    """
    ended = torch.zeros(1)
    started, rounds, told = time.monotonic(), 0, 0
    while not ended:
        replay(exchange, 500)
        exchange_at_random(exchange, 50)
        rounds += 1
        minutes = int(time.monotonic() - started) // 60
        if exchange.place.rank == 0 and minutes > told:
            told = minutes
            sys.stderr.write(f"{minutes} min: {rounds} rounds of 500 replays and 50 random exchanges are right\n")
        ended = exchange.broadcast(torch.tensor([float(time.monotonic() - started > seconds)]), Group.WORLD, 0)
    return rounds


def lose_the_last(exchange: PeerExchange) -> float:
    """Seconds until this rank learns that the last one, in the middle of replays, was killed."""
    values = torch.ones(64, 7168, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            exchange.all_reduce(values, Group.WORLD)
    exchange.limit(WAIT_SECONDS)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    exchange.check()
    exchange.barrier(Group.WORLD)
    torch.cuda.synchronize()
    if exchange.place.rank == exchange.place.layout.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        exchange.check()
    except RankLost:
        return time.monotonic() - started
    except RuntimeError as error:
        # The driver may unmap a killed process's memory from the processes that mapped it, which then get an error.
        assert "CUDA" in str(error), error
        return time.monotonic() - started
    raise AssertionError("nothing was missed")


def _group(exchange: PeerExchange, drawn: random.Random) -> Group:
    return drawn.choice([group for group in Group if len(exchange.place.members(group)) > 1])


def _index(exchange: PeerExchange, group: Group) -> int:
    return exchange.place.members(group).index(exchange.place.rank)


def _shape(drawn: random.Random) -> tuple[int, int]:
    return drawn.choice(ROWS), drawn.choice(WIDTHS)


def _parts(
    exchange: PeerExchange, group: Group, shape: tuple[int, int], dtype: torch.dtype, drawn: random.Random
) -> list[torch.Tensor]:
    """Random tensors of all ranks of the group, sometimes at addresses that are not multiples of 16 bytes."""
    random_numbers = torch.Generator().manual_seed(drawn.getrandbits(32) + exchange.place.members(group).start)
    skipped = drawn.choice((0, 0, 0, 1))
    made = []
    for _ in exchange.place.members(group):
        count = shape[0] * shape[1] + skipped
        if dtype.is_floating_point:
            values = torch.randn(count, generator=random_numbers).to(dtype)
        else:
            values = torch.randint(256, (count,), generator=random_numbers).to(dtype)
        made.append(values.cuda()[skipped:].view(shape))
    return made


def _assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found, expected), (found.shape, found.dtype, (found != expected).sum())

"""Tensors between ranks on several hosts: host memory within each, gloo between them."""

from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.exchange.interface import RankExchange
from engine.parallel.layout import Group, Layout
from kernels.peer_exchange.reference import sum_in_order
from mesh.errors import RankLost
from tests.support.exchanges import exchange_of
from tests.support.rank_threads import on_each_rank

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64)
# One rank on each host, several ranks on each, TP groups, and more hosts than ranks on each.
LAYOUTS = [
    Layout(dp=2, ep=2, hosts=2),
    Layout(dp=4, ep=4, hosts=2),
    Layout(tp=2, dp=2, ep=4, hosts=2),
    Layout(dp=6, ep=3, hosts=3),
]


def exchanged(layout: Layout, act: Callable[[RankExchange], None]) -> None:
    store = HashStore()
    on_each_rank(layout, lambda peers: act(exchange_of(peers, store)))


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 8).to(dtype)


def gathers(own: RankExchange) -> None:
    for dtype in DTYPES:
        for rows in (0, 1, 5):
            gathered = own.all_gather(of_rank(own.place.rank, rows, 3, dtype=dtype), Group.WORLD)
            expected = torch.cat([of_rank(rank, rows, 3, dtype=dtype) for rank in range(own.place.layout.world)])
            assert gathered.dtype == dtype and torch.equal(gathered.float(), expected.float())


def gathers_into_columns(own: RankExchange) -> None:
    world = own.place.layout.world
    outputs = [torch.zeros(3 * world, 4), torch.zeros(4, 2 * world).t()]
    parts = [of_rank(own.place.rank, 3, 4), of_rank(own.place.rank, 4, 2).t()]
    begun = own.begin_all_gather(outputs, parts, Group.WORLD, overlap=True)
    # Another exchange may run meanwhile.
    sums = own.begin_reduce_scatter(torch.ones(2 * world, 3), Group.WORLD, overlap=True)
    begun.finish()
    assert torch.equal(sums.finish(), torch.full((2, 3), float(world)))
    assert torch.equal(outputs[0], torch.cat([of_rank(rank, 3, 4) for rank in range(world)]))
    assert torch.equal(outputs[1], torch.cat([of_rank(rank, 4, 2).t() for rank in range(world)]))


def scatters_sums(own: RankExchange) -> None:
    world, a_host = own.place.layout.world, own.place.layout.ranks_a_host
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows in (0, 2):
            of_all = [of_rank(rank, world * rows, 3, dtype=dtype) for rank in range(world)]
            part = own.begin_reduce_scatter(of_all[own.place.rank], Group.WORLD).finish()
            # Parts are added within each host, then over the hosts.
            of_hosts = [sum_in_order(of_all[first : first + a_host]) for first in range(0, world, a_host)]
            first = own.place.rank * rows
            assert torch.equal(part, sum_in_order(of_hosts)[first : first + rows]) and part.dtype == dtype


def sums_in_order(own: RankExchange) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        of_all = [of_rank(rank, 7, 3, dtype=dtype) for rank in range(own.place.layout.world)]
        assert torch.equal(own.all_reduce(of_all[own.place.rank], Group.WORLD), sum_in_order(of_all))


def broadcasts(own: RankExchange) -> None:
    for source in range(own.place.layout.world):
        given = of_rank(own.place.rank, 3, 4).t()
        assert torch.equal(own.broadcast(given, Group.WORLD, source), of_rank(source, 3, 4).t())
        assert torch.equal(given, of_rank(own.place.rank, 3, 4).t())


def copies_between_ranks(own: RankExchange) -> None:
    world, a_host = own.place.layout.world, own.place.layout.ranks_a_host
    within = [rank // a_host * a_host + (rank + 1) % a_host for rank in range(world)]
    across = [(rank + 1) % world for rank in range(world)]
    swap = [world - 1, *range(1, world - 1), 0]
    # All hosts get from one rank, and ranks of each host from ranks with their number on all others.
    from_last = [world - 1] * world
    reverse = [world - 1 - rank for rank in range(world)]
    for sources in (within, across, swap, from_last, reverse, [1, *range(1, world)]):
        tensors = [of_rank(own.place.rank, 3, 4), of_rank(own.place.rank, 1, dtype=torch.bfloat16)]
        own.copy_between(tensors, Group.WORLD, sources)
        assert torch.equal(tensors[0], of_rank(sources[own.place.rank], 3, 4))
        assert torch.equal(tensors[1], of_rank(sources[own.place.rank], 1, dtype=torch.bfloat16))


def leaves_tp_groups_to_their_host(own: RankExchange) -> None:
    members = own.place.members(Group.TP)
    mine = of_rank(own.place.rank, 4, 3)
    of_group = [of_rank(rank, 4, 3) for rank in members]
    assert torch.equal(own.all_gather(mine, Group.TP), torch.cat(of_group))
    assert torch.equal(own.all_reduce(mine, Group.TP), sum_in_order(of_group))
    assert torch.equal(own.broadcast(mine, Group.TP, 0), of_group[0])
    rows = 4 // len(members)
    start = own.place.tp_index * rows
    summed = own.begin_reduce_scatter(mine, Group.TP).finish()
    assert torch.equal(summed, sum_in_order(of_group)[start : start + rows])


def meets(own: RankExchange) -> None:
    for group in (Group.WORLD, Group.TP):
        own.barrier(group)


ACTS = (
    gathers,
    gathers_into_columns,
    scatters_sums,
    sums_in_order,
    broadcasts,
    copies_between_ranks,
    leaves_tp_groups_to_their_host,
    meets,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_of_several_hosts_exchange_tensors_as_on_one(layout: Layout) -> None:
    def act(own: RankExchange) -> None:
        for each in ACTS:
            each(own)
        own.check()

    exchanged(layout, act)


@pytest.mark.parametrize(
    "lose",
    [
        lambda own: own.all_gather(torch.ones(1, 2), Group.WORLD),
        lambda own: own.begin_reduce_scatter(torch.ones(4, 2), Group.WORLD).finish(),
        lambda own: own.barrier(Group.WORLD),
    ],
    ids=["all_gather", "reduce_scatter", "barrier"],
)
def test_waiting_for_a_lost_rank_of_another_host_fails(lose: Callable[[RankExchange], None]) -> None:
    def act(own: RankExchange) -> None:
        own.barrier(Group.WORLD)
        if own.place.rank < own.place.layout.world - 1:
            with pytest.raises(RankLost, match="has ended"):
                lose(own)

    exchanged(Layout(dp=4, ep=4, hosts=2), act)

"""Tensors between ranks over host memory."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import torch

from engine.exchange.alone import Alone
from engine.exchange.host import HostExchange
from engine.exchange.interface import RankExchange
from engine.parallel.layout import Group, Layout
from engine.parallel.peers import TENSOR_SLOT_BYTES
from kernels.peer_exchange.reference import sum_in_order
from mesh.errors import RankLost
from tests.support.rank_threads import on_each_rank

ResultT = TypeVar("ResultT")


def exchanged(layout: Layout, act: Callable[[RankExchange], ResultT]) -> list[ResultT]:
    return on_each_rank(layout, lambda peers: act(HostExchange(peers)))


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed(own: RankExchange, values: torch.Tensor, group: Group) -> torch.Tensor:
    return own.begin_reduce_scatter(values, group).finish()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_all_gather_joins_the_parts_in_order(ranks: int, rows: int) -> None:
    gathered = exchanged(Layout(dp=ranks), lambda own: own.all_gather(of_rank(own.place.rank, rows, 3), Group.WORLD))
    expected = torch.cat([of_rank(rank, rows, 3) for rank in range(ranks)])
    assert all(torch.equal(each, expected) for each in gathered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(dtype: torch.dtype) -> None:
    parts = exchanged(
        Layout(dp=4), lambda own: summed(own, of_rank(own.place.rank, 8, 3, dtype=dtype) * 8, Group.WORLD)
    )
    total = sum(of_rank(rank, 8, 3, dtype=dtype).double() * 8 for rank in range(4))
    assert all(each.dtype == dtype and each.shape == (2, 3) for each in parts)
    torch.testing.assert_close(torch.cat(parts).double(), total, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_same_sum_bit_by_bit(dtype: torch.dtype) -> None:
    sums = exchanged(Layout(dp=4), lambda own: own.all_reduce(of_rank(own.place.rank, 64, 7, dtype=dtype), Group.WORLD))
    assert all(torch.equal(each, sums[0]) for each in sums)
    in_order = of_rank(0, 64, 7, dtype=dtype).float()
    for rank in range(1, 4):
        in_order = in_order + of_rank(rank, 64, 7, dtype=dtype).float()
    assert torch.equal(sums[0], in_order.to(dtype))


def test_broadcast_gives_all_the_values_of_one() -> None:
    received = exchanged(Layout(dp=3, ep=1), lambda own: own.broadcast(of_rank(own.place.rank, 4), Group.WORLD, 2))
    assert all(torch.equal(each, of_rank(2, 4)) for each in received)


@pytest.mark.parametrize("sources", [[0, 1, 2], [2, 1, 0], [0, 0, 2], [1, 2, 0]])
def test_each_rank_gets_the_tensors_of_its_source(sources: list[int]) -> None:
    shapes = ((3,), (TENSOR_SLOT_BYTES // 4 + 1,))

    def act(own: RankExchange) -> bool:
        rank = own.place.rank
        tensors = [of_rank(rank, *shape) for shape in shapes]
        own.copy_between(tensors, Group.WORLD, sources)
        return all(map(torch.equal, tensors, [of_rank(sources[rank], *shape) for shape in shapes]))

    assert all(exchanged(Layout(dp=3), act))


def test_a_strided_tensor_is_exchanged_by_its_values() -> None:
    gathered = exchanged(Layout(dp=2), lambda own: own.all_gather(of_rank(own.place.rank, 3, 4).t(), Group.WORLD))
    assert torch.equal(gathered[0], torch.cat([of_rank(0, 3, 4).t(), of_rank(1, 3, 4).t()]))


def test_tensors_larger_than_a_slot_go_in_pieces() -> None:
    rows = 2 * (TENSOR_SLOT_BYTES // 4 // 1000 + 3)

    def act(own: RankExchange) -> torch.Tensor:
        values = of_rank(own.place.rank, rows, 1000)
        return own.all_gather(summed(own, values, Group.WORLD), Group.WORLD)

    expected = of_rank(0, rows, 1000) + of_rank(1, rows, 1000)
    assert all(torch.equal(each, expected) for each in exchanged(Layout(dp=2), act))


@pytest.mark.parametrize("rows", [0, 3, TENSOR_SLOT_BYTES // 4 // 250])
def test_later_exchanges_do_not_change_one_that_is_begun(rows: int) -> None:
    """Several tensors are exchanged at once, with an exchange of either group before they are finished."""
    layout = Layout(tp=2, dp=2, ep=4)

    def act(own: RankExchange) -> list[torch.Tensor]:
        rank = own.place.rank
        parts = [of_rank(rank, rows, 250), of_rank(rank, rows + 1, dtype=torch.bfloat16), of_rank(rank, 5, rows).t()]
        outputs = [part.new_empty(4 * len(part), *part.shape[1:]) for part in parts]
        gathered = own.begin_all_gather(outputs, parts, Group.WORLD, overlap=True)
        near = own.all_reduce(torch.tensor([float(rank)]), Group.TP)
        total = own.begin_reduce_scatter(of_rank(rank, 4 * rows, 3), Group.WORLD, overlap=True)
        last = own.begin_reduce_scatter(near.repeat(4), Group.WORLD, overlap=True)
        gathered.finish()
        return [*outputs, total.finish(), last.finish(), total.finish()]

    for rank, found in enumerate(exchanged(layout, act)):
        assert torch.equal(found[0], torch.cat([of_rank(each, rows, 250) for each in range(4)]))
        assert torch.equal(found[1], torch.cat([of_rank(each, rows + 1, dtype=torch.bfloat16) for each in range(4)]))
        assert torch.equal(found[2], torch.cat([of_rank(each, 5, rows).t() for each in range(4)]))
        sums = sum_in_order([of_rank(each, 4 * rows, 3) for each in range(4)])
        assert torch.equal(found[3], sums[rank * rows : (rank + 1) * rows]) and found[5] is found[3]
        # The sum of 1, 1, 5 and 5.
        assert found[4].item() == 12


def test_groups_that_overlap_do_not_disturb_each_other() -> None:
    def act(own: RankExchange) -> torch.Tensor:
        values = torch.tensor([float(own.place.rank)])
        for _ in range(30):
            values = own.all_reduce(values, Group.TP)
            values = own.all_reduce(own.all_reduce(values, Group.TP), Group.WORLD) / 16
            own.barrier(Group.TP)
        return values

    # Two TP groups of sums 1 and 5; each doubled, so that all together have (2 + 2 + 10 + 10) / 16.
    first = 24 / 16
    expected = torch.tensor([first])
    for _ in range(29):
        expected = expected * 2 * 2 * 4 / 16
    assert all(torch.equal(each, expected) for each in exchanged(Layout(tp=2, dp=2, ep=4), act))


def test_waiting_for_a_rank_that_has_left_fails() -> None:
    def act(own: RankExchange) -> torch.Tensor:
        if own.place.rank == 1:
            return torch.zeros(0)
        with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
            own.barrier(Group.WORLD)
        return torch.ones(0)

    exchanged(Layout(dp=2), act)


def test_what_a_rank_sent_before_it_left_is_received() -> None:
    received = exchanged(Layout(dp=2), lambda own: own.all_gather(torch.tensor([own.place.rank]), Group.WORLD))
    assert [each.tolist() for each in received] == [[0, 1], [0, 1]]


def test_one_rank_alone_gets_back_what_it_gives() -> None:
    values, alone = of_rank(0, 4), Alone()
    for given in (alone.all_gather, partial(summed, alone), alone.all_reduce):
        assert torch.equal(given(values, Group.WORLD), values)
    assert torch.equal(alone.broadcast(values, Group.TP, 0), values)

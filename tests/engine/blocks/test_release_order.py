"""A pool evicts the least recently released block, whichever were taken back in between."""

from hypothesis import given
from hypothesis import strategies as st

from engine.blocks.kv_pool import ReleaseOrder

BLOCKS = 6


@given(st.lists(st.integers(0, BLOCKS)))
def test_blocks_leave_in_the_order_they_were_last_added(moves: list[int]) -> None:
    """moves: a block to be added, or taken if it is there already; BLOCKS takes the first block."""
    order, expected = ReleaseOrder(BLOCKS), list[int]()
    for block in moves:
        if block in expected:
            order.take(block)
            expected.remove(block)
        elif block < BLOCKS:
            order.add(block)
            expected.append(block)
        elif expected:
            assert order.take_first() == expected.pop(0)
        assert len(order) == len(expected)
    assert [order.take_first() for _ in range(len(order))] == expected

"""How fast fetches are, by where the store had the blocks."""

import pytest

from transfer.fetch.rates import FetchRates


def test_each_tier_has_a_rate_of_its_own() -> None:
    rates = FetchRates()
    rates.observe(blocks=8, in_memory=8, size_bytes=800, seconds=1.0)
    rates.observe(blocks=8, in_memory=0, size_bytes=800, seconds=4.0)
    assert (rates.memory, rates.disk) == (800.0, 200.0)
    rates.observe(blocks=8, in_memory=2, size_bytes=800, seconds=4 * 2.0**5)
    assert rates.memory == 800.0 and rates.disk == pytest.approx(100.0)


def test_a_fetch_of_both_and_one_of_nothing_say_nothing() -> None:
    rates = FetchRates()
    rates.observe(blocks=8, in_memory=4, size_bytes=800, seconds=1.0)
    rates.observe(blocks=0, in_memory=0, size_bytes=0, seconds=1.0)
    rates.observe(blocks=8, in_memory=8, size_bytes=800, seconds=0.0)
    assert (rates.memory, rates.disk) == (None, None)

import math

import pytest

from bench.rank.power import Load, PowerModel, fit, mean_watts
from capacity.floor import Operation

MODEL = PowerModel(700.0, 150.0, 100e-12, 140e-12, 50e-12, 0.4e-12, 0.8e-12, 0.0)


def _load(
    name: str, seconds: float, read: float = 0.0, written: float = 0.0, fp8: float = 0.0, bf16: float = 0.0
) -> Load:
    joules = MODEL.idle_watts * seconds + MODEL.joules_per_read_byte * read + MODEL.joules_per_written_byte * written
    joules += MODEL.joules_per_fp8_flop * fp8 + MODEL.joules_per_bf16_flop * bf16
    return Load(name, seconds, joules / seconds, read, written, fp8_flops=fp8, bf16_flops=bf16)


LOADS = [
    _load("wait", 1e-3),
    _load("read", 1e-3, read=4e9),
    _load("copy", 1e-3, read=2e9, written=2e9),
    Load("cached", 1e-3, 150 + 50e-12 * 6e9 / 1e-3, cached_bytes=6e9),
    _load("fp8", 1e-3, read=1e8, fp8=1.2e12),
    _load("bf16", 2e-3, written=1e8, bf16=1.3e12),
    _load("read fp8", 2e-3, read=4e9, fp8=1.2e12),
]


def test_power_is_that_between_changes_of_the_counter() -> None:
    samples = [(0.0, 5.0), (0.1, 5.0), (0.2, 75.0), (0.3, 75.0), (0.4, 215.0), (0.5, 215.0)]
    assert mean_watts(samples) == pytest.approx((215 - 75) / 0.2)


def test_power_is_unknown_with_one_change() -> None:
    assert math.isnan(mean_watts([(0.0, 5.0), (0.1, 75.0), (0.2, 75.0)]))


def test_a_fit_finds_what_loads_were_made_of() -> None:
    found = fit(LOADS, 700.0)
    assert found.idle_watts == pytest.approx(MODEL.idle_watts)
    assert found.joules_per_read_byte == pytest.approx(MODEL.joules_per_read_byte)
    assert found.joules_per_written_byte == pytest.approx(MODEL.joules_per_written_byte)
    assert found.joules_per_cached_byte == pytest.approx(MODEL.joules_per_cached_byte)
    assert found.joules_per_fp8_flop == pytest.approx(MODEL.joules_per_fp8_flop)
    assert found.joules_per_bf16_flop == pytest.approx(MODEL.joules_per_bf16_flop)
    assert found.worst < 1e-9


def test_a_fit_says_how_far_a_load_is_off() -> None:
    odd = Load("odd", 1e-3, 300.0)
    assert fit([*LOADS, odd], 700.0).worst > 0.1


def test_a_step_takes_as_long_as_its_energy_needs() -> None:
    operations = [Operation("experts", 4e9, 1e12, fp8=True), Operation("head", 1e9, 1e11, fp8=False)]
    joules = 5e9 * 100e-12 + 1e12 * 0.4e-12 + 1e11 * 0.8e-12
    assert MODEL.seconds(operations) == pytest.approx(joules / (700 - 150))

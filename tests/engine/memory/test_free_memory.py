import pytest
import torch

from engine.memory.free_memory import leave_to_driver, may_keep_all
from engine.memory.memory_plan import DRIVER_BYTES

CUDA = torch.device("cuda")


@pytest.mark.gpu
def test_torch_leaves_memory_to_the_driver() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.reset_peak_memory_stats()
    try:
        leave_to_driver(CUDA, 1.0, 0)
        assert torch.cuda.get_per_process_memory_fraction() * total <= total - DRIVER_BYTES
        leave_to_driver(CUDA, 0.01, 0)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.01)
    finally:
        may_keep_all(CUDA, 1.0)


def test_a_cpu_has_no_limit() -> None:
    may_keep_all(torch.device("cpu"), 0.5)
    leave_to_driver(torch.device("cpu"), 0.5, 0)


@pytest.mark.parametrize(
    ("free", "steps", "more"),
    [
        # The driver keeps its part next to staging for transfers.
        (8 * DRIVER_BYTES, DRIVER_BYTES, 6 * DRIVER_BYTES),
        # The largest steps need some of both.
        (2 * DRIVER_BYTES, DRIVER_BYTES, DRIVER_BYTES),
        (DRIVER_BYTES, 2 * DRIVER_BYTES, DRIVER_BYTES),
    ],
)
def test_transfers_take_none_of_the_drivers_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, steps: int, more: int
) -> None:
    reserved, total = 10 * DRIVER_BYTES, 100 * DRIVER_BYTES
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved + steps)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    leave_to_driver(CUDA, 1.0, transfers_bytes=DRIVER_BYTES)
    assert fractions == [pytest.approx((reserved + more) / total)]

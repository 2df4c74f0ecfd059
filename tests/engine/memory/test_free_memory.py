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
        leave_to_driver(CUDA, 1.0)
        assert torch.cuda.get_per_process_memory_fraction() * total <= total - DRIVER_BYTES
        leave_to_driver(CUDA, 0.01)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.01)
    finally:
        may_keep_all(CUDA, 1.0)


def test_a_cpu_has_no_limit() -> None:
    may_keep_all(torch.device("cpu"), 0.5)
    leave_to_driver(torch.device("cpu"), 0.5)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gpus import Gpu, assign, find_gpus, name_gpus
from mesh.errors import ConfigError

WORKERS = st.lists(st.integers().map(str), unique=True, max_size=12)
GPUS = st.lists(st.integers(0, 99).map(str), unique=True, min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (0, None, ()),
        (2, None, ("0", "1")),
        (2, "3,1", ("3", "1")),
        (1, " GPU-8f2a , GPU-77c0", ("GPU-8f2a",)),
        (0, "", ()),
    ],
)
def test_gpus_have_the_names_that_cuda_was_told(count: int, visible: str | None, names: tuple[str, ...]) -> None:
    assert name_gpus(count, visible) == names


def test_without_gpus_nobody_gets_one() -> None:
    assert assign({"decode-0": 2}, []) == {}


@given(workers=WORKERS, gpus=GPUS)
def test_each_worker_sees_its_own_gpu_first(workers: list[str], gpus: list[str]) -> None:
    assigned = assign(dict.fromkeys(workers, 1), gpus)
    counts = [sum(each.name == name for each in assigned.values()) for name in gpus]
    assert sum(counts) == len(workers)
    assert max(counts) - min(counts) <= 1
    for gpu in assigned.values():
        assert gpu.workers == counts[gpus.index(gpu.name)]
        assert sorted((gpu.name, *gpu.others)) == sorted(gpus)


def test_a_worker_of_several_ranks_has_a_gpu_for_each() -> None:
    assigned = assign({"decode-0": 2, "decode-1": 2, "prefill-0": 1}, ["0", "1", "2", "3"])
    assert [each.own for each in assigned.values()] == [("0", "1"), ("2", "3"), ("0",)]
    assert [each.workers for each in assigned.values()] == [2, 1, 2]
    assert assigned["decode-1"].environment == {"CUDA_VISIBLE_DEVICES": "2,3,0,1"}


def test_a_worker_of_more_ranks_than_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode-0 has 4 ranks, each on a GPU of its own, and there are 2 GPUs"):
        assign({"decode-0": 4}, ["0", "1"])


def test_the_own_gpu_is_the_first_that_a_process_sees() -> None:
    assert Gpu("2", ("0", "1")).environment == {"CUDA_VISIBLE_DEVICES": "2,0,1"}


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.settings.card._DRIVER", "libno-such-driver.so")
    assert find_gpus() == ()


@pytest.mark.gpu
def test_the_driver_counts_as_torch_does() -> None:
    import torch

    assert len(find_gpus()) == torch.cuda.device_count()

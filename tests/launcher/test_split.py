import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.split import Split, split_gpus
from mesh.errors import ConfigError


@pytest.mark.parametrize(
    ("gpus", "split", "expected"),
    [
        (4, "1D", Split(1, 4)),
        (4, "2D", Split(2, 2)),
        (4, "1P+1D", Split(1, 2, 1, 2)),
        (8, "2P+2D", Split(2, 2, 2, 2)),
        (4, "2Px1+1Dx2", Split(1, 2, 2, 1)),
        (4, "1Px1+1D", Split(1, 3, 1, 1)),
        (4, "2P+1Dx2", Split(1, 2, 2, 1)),
        (4, "1Dx4", Split(1, 4)),
    ],
)
def test_gpus_are_divided_equally_unless_sizes_are_given(gpus: int, split: str, expected: Split) -> None:
    assert split_gpus(gpus, split) == expected


@pytest.mark.parametrize("split", ["1P+2D", "5D", "1Px4+1D", "1Px1+1Dx2", "1Px0+1D", "1Px3+1Dx2", "1Dx2"])
def test_a_split_must_use_all_gpus(split: str) -> None:
    with pytest.raises(ConfigError, match=r"does not divide --gpus 4: give numbers that do"):
        split_gpus(4, split)


@pytest.mark.parametrize("split", ["", "P", "1P", "1p+1d", "0D", "1P+0D", "1D+1P", "1P+1D+1D", "ifb", "-1D", "1P 1D"])
def test_what_is_no_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="expected how many workers of each role, as in 1D"):
        split_gpus(4, split)


@given(gpus=st.integers(1, 64), prefill=st.integers(0, 9), decode=st.integers(1, 9))
def test_every_gpu_is_used_once_or_the_split_is_refused(gpus: int, prefill: int, decode: int) -> None:
    split = (f"{prefill}P+" if prefill else "") + f"{decode}D"
    try:
        found = split_gpus(gpus, split)
    except ConfigError:
        assert gpus % (prefill + decode)
    else:
        assert found.prefill_workers * found.prefill_ranks + found.decode_workers * found.decode_ranks == gpus
        assert min(found.decode_ranks, found.prefill_ranks if prefill else 1) > 0

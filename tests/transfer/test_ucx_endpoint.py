import pytest

from transfer.ucx_endpoint import transport_in

DESCRIPTION = """
# | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from host memory         |
# |                          0..92 | eager short                                | tcp/lo      |
# |                        8K..inf | (?) rendezvous fragmented copy-in copy-out | {lanes} |
"""


@pytest.mark.parametrize(
    ("lanes", "name"),
    [("posix/memory", "posix"), ("50% on tcp/eth0 and 50% on tcp/eth1", "tcp"), ("cma/memory and tcp/lo", "cma+tcp")],
)
def test_the_transport_is_that_of_the_largest_messages(lanes: str, name: str) -> None:
    assert transport_in(DESCRIPTION.format(lanes=lanes), from_host=True) == name


@pytest.mark.parametrize(("from_host", "name"), [(False, "cuda_ipc"), (True, "tcp")])
def test_the_transport_is_that_of_the_segments_memory(from_host: bool, name: str) -> None:
    gpu = DESCRIPTION.replace("host memory", "cuda/GPU0").format(lanes="cuda_ipc/cuda")
    assert transport_in(gpu + DESCRIPTION.format(lanes="tcp/lo"), from_host) == name


def test_without_a_table_for_a_gpu_the_other_counts() -> None:
    assert transport_in(DESCRIPTION.format(lanes="tcp/lo"), from_host=False) == "tcp"


def test_a_description_that_says_nothing_is_unknown() -> None:
    assert transport_in("", from_host=True) == "unknown"

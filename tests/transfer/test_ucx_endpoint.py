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
    assert transport_in(DESCRIPTION.format(lanes=lanes)) == name


def test_the_transport_of_gpu_memory_precedes_that_of_host_memory() -> None:
    gpu = DESCRIPTION.replace("host memory", "cuda/GPU0").format(lanes="cuda_ipc/cuda")
    assert transport_in(gpu + DESCRIPTION.format(lanes="tcp/lo")) == "cuda_ipc"


def test_a_description_that_says_nothing_is_unknown() -> None:
    assert transport_in("") == "unknown"

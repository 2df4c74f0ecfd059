"""Ranks agree on whether their GPUs reach each other."""

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs CUDA's bindings")

from cuda.bindings.driver import CUresult

from engine.exchange.host import HostExchange
from engine.exchange.peer_memory import agree
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from mesh.errors import EngineFailed
from tests.support.rank_threads import on_each_rank


def test_every_rank_names_the_gpu_that_fails() -> None:
    def act(peers: Peers) -> str:
        unreachable = CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        with pytest.raises(EngineFailed) as raised:
            agree(HostExchange(peers), unreachable if peers.place.rank == 1 else CUresult.CUDA_SUCCESS, "map memory")
        return raised.value.message

    said = "the GPU of rank 1 cannot map memory (CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)"
    assert on_each_rank(Layout(dp=2), act) == [said, said]


def test_ranks_whose_gpus_can_go_on() -> None:
    on_each_rank(Layout(dp=2), lambda peers: agree(HostExchange(peers), CUresult.CUDA_SUCCESS, "map memory"))

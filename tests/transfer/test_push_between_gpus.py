"""Pushes over real UCX between pools on GPUs, each in a process that sees its own GPU alone."""

import pytest

from mesh.errors import ConfigError
from tests.support.transfer_peer import BLOCKS, CONFIG, LAYERS, Peer, Watch, assert_all_free
from transfer.events import Landed, PushEnded
from transfer.ucx_settings import check_carries_gpu_memory

HERE = list(range(50))
THERE = list(range(BLOCKS - 1, BLOCKS - 51, -1))
GPUS = [pytest.param("0", "0", marks=pytest.mark.gpu), pytest.param("0", "1", marks=pytest.mark.multi_gpu)]


@pytest.mark.parametrize(("gpu", "other"), GPUS)
@pytest.mark.parametrize(("transports", "carrier"), [(None, "cuda_ipc"), ("cuda_copy,tcp", "tcp")])
def test_a_push_puts_one_gpus_blocks_into_anothers(gpu: str, other: str, transports: str | None, carrier: str) -> None:
    config = CONFIG.model_copy(update={"transports": transports})
    with Peer(seed=1, config=config, gpu=gpu) as here, Peer(seed=2, config=config, gpu=other) as peer:
        watch = Watch(here, peer)
        untouched = here.blocks(range(50, BLOCKS))
        ticket = here.agent("open_landing", HERE, 100, 0, 30.0)
        peer.agent("push", ticket, THERE)
        peer.agent("ready", ticket.transfer_id, LAYERS, len(THERE))
        watch.until(Landed, PushEnded)
        assert (here.blocks(HERE) == peer.blocks(THERE)).all()
        assert (here.blocks(range(50, BLOCKS)) == untouched).all()
        assert assert_all_free(here).received_bytes == {carrier: ticket.size_bytes}
        assert_all_free(peer)


@pytest.mark.parametrize("transports", [None, "all", "cuda_copy,tcp", "tcp,cuda_ipc,cuda_copy", "tcp,cuda", "^posix"])
def test_transports_that_reach_gpu_memory_are_accepted(transports: str | None) -> None:
    check_carries_gpu_memory(transports)


@pytest.mark.parametrize("transports", ["tcp", "posix,self", "cuda_ipc,tcp", "^cuda", "^tcp,cuda_copy"])
def test_transports_without_gpu_memory_are_refused_with_advice(transports: str) -> None:
    with pytest.raises(ConfigError, match="cuda_copy"):
        check_carries_gpu_memory(transports)

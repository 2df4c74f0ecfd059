"""The ranks of a TP group compute the first rank's batches, and their KV equals its KV."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backend import execute
from engine.batch import Batch, History, Row, Sample
from engine.config import EngineConfig
from engine.exchange.host import HostExchange
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.step.shape import StepShape, shape_of
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import GREEDY, model_backend, prompt_row, random_prompt, tiny_checkpoint
from tests.support.rank_threads import on_each_rank
from transfer.checksum import segment_checksum
from transfer.segments import Tile

TP2 = Layout(tp=2, ep=2)
KEY = bytes(16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def backend_of(directory: Path, peers: Peers, **settings: Any) -> ModelBackend:
    config = EngineConfig(**{"model_dir": directory, "device": "cpu", "total_blocks": 8, **settings})
    return ModelBackend(resolve(config, Hardware(0, 1 << 30)), exchange=HostExchange(peers))


def run(directory: Path, peers: Peers, steps: Sequence[Sequence[Row]]) -> list[list[Sample | None]]:
    """Run the steps on the first rank, and dummies of the same shapes on the others."""
    backend = backend_of(directory, peers)
    batches = [Batch(number, rows if peers.place.leads else ()) for number, rows in enumerate(steps)]
    return [execute(backend, batch, shape_of(rows)) for batch, rows in zip(batches, steps, strict=True)]


def steps_of(prompt: list[int], sampling: Sampling) -> list[list[Row]]:
    """A prompt in two chunks, then a row that follows the token drawn after it."""
    history = History(key=1, prompt_tokens=len(prompt), token_ids=prompt) if sampling.counts_tokens else None
    last = Row(prompt[65:], 65, range(2), sampling, history=history)
    return [
        [prompt_row(prompt, 0, 65, range(2), last=False)],
        [last],
        [Row((), len(prompt), range(2), sampling, follows=0, history=history)],
    ]


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1.0, top_p=0.9, seed=3), Sampling(temperature=1.0, frequency_penalty=1.0)]
)
def test_every_rank_has_the_tokens_that_the_first_draws(checkpoint: Path, sampling: Sampling) -> None:
    steps = steps_of(random_prompt(100), sampling)
    alone = model_backend(checkpoint)
    expected = [execute(alone, Batch(number, rows), shape_of(rows)) for number, rows in enumerate(steps)]
    for samples in on_each_rank(TP2, lambda peers: run(checkpoint, peers, steps)):
        assert samples == expected


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
@pytest.mark.parametrize("sent", [True, False], ids=["sent", "mapped"])
def test_kv_that_lands_on_the_first_rank_reaches_all_pools(checkpoint: Path, kv_dtype: str, sent: bool) -> None:
    prompt = random_prompt(70)

    def compute(peers: Peers) -> torch.Tensor:
        backend = backend_of(checkpoint, peers, kv_dtype=kv_dtype)
        if peers.place.leads:
            memory = backend.kv_memory()
            staging = memory.allocate_staging(1 << 20)
            staging[:] = np.random.default_rng(0).integers(0, 60, len(staging), np.uint8)
            size_bytes = memory.layers * 2 * memory.piece_bytes
            checksum = segment_checksum(staging, size_bytes, KEY)
            if sent:
                assert memory.land(0, memory.layers, [3, 5], staging, KEY, checksum).result()
            else:
                mapped = staging[:size_bytes].reshape(2, memory.layers, memory.piece_bytes)
                copied = memory.host_source(mapped).copy(Tile(0, memory.layers, 0, 2), [0, 1], [3, 5])
                assert copied.result() is None
        rows = [prompt_row(prompt, 64, 70, [3, 1])]
        execute(backend, Batch(0, rows if peers.place.leads else ()), shape_of(rows))
        return backend.state.kv_pool.float()

    first, second = on_each_rank(TP2, compute)
    assert first[:, [3, 5]].abs().sum() > 0
    assert torch.equal(first, second)


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_kv_that_is_read_from_host_memory_reaches_all_pools(checkpoint: Path, kv_dtype: str) -> None:
    prompt = random_prompt(70)

    def compute(peers: Peers) -> torch.Tensor:
        backend = backend_of(checkpoint, peers, kv_dtype=kv_dtype, host_blocks=4)
        rows, again = [prompt_row(prompt, 0, 70, [6, 1])], [prompt_row(prompt, 64, 70, [5, 1])]
        execute(backend, Batch(0, rows if peers.place.leads else ()), shape_of(rows))
        if peers.place.leads:
            slots = backend.host_slots()
            assert slots is not None
            slots.write([6], [3]).result()
            slots.read([3], [5]).result()
        execute(backend, Batch(1, again if peers.place.leads else ()), shape_of(again))
        return backend.state.kv_pool.float()

    for pool in on_each_rank(TP2, compute):
        assert pool[:, 5].abs().sum() > 0
        assert torch.equal(pool[:, 5], pool[:, 6])


def test_draft_layers_that_are_cleared_are_empty_everywhere(checkpoint: Path) -> None:
    prompt = random_prompt(70)

    def compute(peers: Peers) -> torch.Tensor:
        backend = backend_of(checkpoint, peers, drafts={"next_n": 1}, kv_dtype="float8_e4m3fn")
        backend.state.kv_pool.fill_(1.0)
        if peers.place.leads:
            backend.clear_drafts([3, 5])
        rows = [prompt_row(prompt, 64, 70, [3, 1])]
        execute(backend, Batch(0, rows if peers.place.leads else ()), shape_of(rows))
        return backend.state.kv_pool.float()

    for pool in on_each_rank(TP2, compute):
        assert not pool[-1, [3, 5]].any()
        assert pool[:-1, [3, 5]].all() and pool[-1, [2, 4]].all()


def test_pools_are_as_large_as_the_groups_smallest(checkpoint: Path) -> None:
    def make(peers: Peers) -> int:
        return backend_of(checkpoint, peers, total_blocks=8 - peers.place.rank).total_blocks

    assert on_each_rank(TP2, make) == [7, 7]


def test_a_dummy_step_is_one_on_every_rank(checkpoint: Path) -> None:
    def compute(peers: Peers) -> list[Sample | None]:
        return execute(backend_of(checkpoint, peers), Batch(0, ()), StepShape(3))

    assert on_each_rank(TP2, compute) == [[], []]

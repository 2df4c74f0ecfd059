"""A model whose pool is small, with host memory under it: tokens are those of a pool that evicts nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.moves.host_slots import HostSlots
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.engines import Transcript, assert_at_rest, submit_of
from tests.support.waiting import wait_until

HOST_BLOCKS = 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS: list[dict[str, Any]] = [
    # In float32 rounding decides nothing: steps of other shapes draw the same tokens.
    {"dtype": "float32"},
    {"dtype": "float32", "kv_dtype": "float8_e4m3fn", "drafts": DraftsConfig(next_n=2)},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class LockedBackend(ModelBackend):
    """A backend whose host memory is page-locked before anything is served: a GPU's grows while it serves."""

    def host_slots(self) -> HostSlots | None:
        slots = super().host_slots()
        wait_until(lambda: slots is None or slots.count == HOST_BLOCKS)
        return slots


def served(checkpoint: Path, **settings: Any) -> tuple[Engine, list[Transcript]]:
    """Three sessions of three turns each, in turn."""
    config = EngineConfig(model_dir=checkpoint, max_step_tokens=128, max_requests=8, warm_up="off", **settings)
    backend = LockedBackend(resolve(config, Hardware(torch.cuda.device_count(), 1 << 30)))
    engine = Engine(config, backend, lambda: 0.0)
    said = [random_prompt(150 + 30 * session, seed=session) for session in range(3)]
    turns = []
    for turn in range(3):
        for session in range(3):
            key = 3 * turn + session
            engine.submit(submit_of(key, said[session], 10, ignore_eos=True))
            transcript = Transcript().run_with_reads(engine)
            turns.append(transcript)
            said[session] += transcript.token_ids[key] + random_prompt(60, seed=key)
    assert_at_rest(engine)
    return engine, turns


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tokens_are_those_of_a_pool_that_evicts_nothing(checkpoint: Path, form: dict[str, Any], device: str) -> None:
    _, expected = served(checkpoint, total_blocks=64, host_blocks=0, device=device, **form)
    engine, found = served(checkpoint, total_blocks=7, host_blocks=HOST_BLOCKS, device=device, **form)
    assert [turn.token_ids for turn in found] == [turn.token_ids for turn in expected]
    # All that was said is found again, in one memory or the other.
    assert [turn.cached_tokens for turn in found] == [turn.cached_tokens for turn in expected]
    status = engine.load().host_tier
    assert status is not None and status.read_blocks > 10

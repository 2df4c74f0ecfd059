"""Several MTP modules with weights of their own. Each reads the output of the module before it for the token before."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backend import execute
from engine.batch import Batch
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from engine.step.shape import StepShape
from launcher.shipped_model import shipped_model
from mesh.domain.sampling import Sampling
from mesh.errors import CheckpointError
from tests.support.checkpoints import (
    model_backend,
    random_prompt,
    rewrite_as_one_file,
    tiny_checkpoint,
    with_modules,
)
from tests.support.disaggregation import Pair, assert_nothing_moves
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, assert_at_rest, submit_of
from tests.support.fake_agent import Fabric, FakeAgent
from transfer.config import TransferConfig

MODULES = 3
# The answer to the long prompt fills up its third block and begins a fourth, the one to the short begins a second.
LONG, SHORT, TOKENS = random_prompt(170), random_prompt(50, seed=1), 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_nextn_predict_layers=MODULES)


def settings_of(next_n: int, **settings: Any) -> dict[str, Any]:
    drafts = DraftsConfig(next_n=next_n)
    return {"max_step_tokens": 96, "max_requests": 4, "total_blocks": 32, "drafts": drafts, **settings}


def engine_over(backend: ModelBackend, next_n: int, **settings: Any) -> Engine:
    config = EngineConfig(model_dir=Path("checkpoint"), **settings_of(next_n, **settings))
    return Engine(config, backend, time.monotonic)


def served(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, **settings: Any) -> Transcript:
    for key, prompt in enumerate(prompts):
        engine.submit(submit_of(key, prompt, tokens, ignore_eos=True, **settings))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


def draft_latents(backend: ModelBackend, engine: Engine, chain: Sequence[bytes]) -> torch.Tensor:
    """The latents that the draft layers keep for these blocks: [modules, tokens, latent]."""
    blocks = engine.pool.match_prefix(chain)
    assert len(blocks) == len(chain)
    return backend.state.kv_pool[-MODULES:, blocks].flatten(1, 2).clone()


class Whole:
    """A prompt and its answer, computed again as one prompt in one step."""

    def __init__(self, checkpoint: Path) -> None:
        plain = model_backend(checkpoint, **settings_of(0))
        self.answers = [served(engine_over(plain, 0), [prompt], TOKENS).token_ids[0] for prompt in (LONG, SHORT)]
        settings = {"max_step_tokens": 512}
        backend = model_backend(checkpoint, **settings_of(MODULES, **settings))
        engine = engine_over(backend, MODULES, **settings)
        stored = served(engine, [[*LONG, *self.answers[0]]], 1).steps
        self.chain = [block for step in stored for block in step.stored_blocks]
        self.latents = draft_latents(backend, engine, self.chain)
        assert self.latents.shape[1] == 192 and self.latents.abs().sum(2).all()


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Whole:
    return Whole(checkpoint)


def assert_same(backend: ModelBackend, engine: Engine, whole: Whole) -> None:
    found = draft_latents(backend, engine, whole.chain)
    assert torch.allclose(found, whole.latents, atol=1e-4)


@pytest.mark.parametrize(("next_n", "overlap"), [(3, "off"), (5, "on")])
def test_prompts_and_answers_leave_the_same_kv_of_modules(
    checkpoint: Path, whole: Whole, next_n: int, overlap: str
) -> None:
    backend = model_backend(checkpoint, **settings_of(next_n))
    engine = engine_over(backend, next_n, overlap=overlap)
    # The long prompt is computed in chunks of 96 tokens, while a request decodes.
    assert served(engine, [SHORT, LONG], TOKENS).token_ids == {0: whole.answers[1], 1: whole.answers[0]}
    assert_same(backend, engine, whole)


def test_modules_find_what_they_need_after_cached_blocks(checkpoint: Path, whole: Whole) -> None:
    backend = model_backend(checkpoint, **settings_of(MODULES))
    engine = engine_over(backend, MODULES)
    served(engine, [LONG[:130]], 1)
    before = backend.state.kv_pool[:, engine.pool.match_prefix(whole.chain)].clone()
    # States that other requests left in these blocks must not matter.
    assert backend.state.draft_states is not None
    backend.state.draft_states[:, : backend.total_blocks] = 7.0
    again = served(engine, [LONG], TOKENS)
    assert (again.token_ids[0], again.cached_tokens) == (whole.answers[0], {0: 128})
    assert_same(backend, engine, whole)
    assert torch.equal(backend.state.kv_pool[:, engine.pool.match_prefix(whole.chain[:2])], before)


@pytest.mark.parametrize("left", [1, 2])
def test_a_small_step_writes_no_stale_kv_after_cached_blocks(checkpoint: Path, whole: Whole, left: int) -> None:
    backend = model_backend(checkpoint, **settings_of(MODULES))
    engine = engine_over(backend, MODULES)
    served(engine, [LONG[:130]], 1)
    before = backend.state.kv_pool[:, engine.pool.match_prefix(whole.chain)].clone()
    assert backend.state.draft_states is not None
    backend.state.draft_states[:, : backend.total_blocks] = 7.0
    # Shorter prompts take the rest of the step's 96 tokens.
    found = served(engine, [random_prompt(50, seed=2), random_prompt(46 - left, seed=3), LONG], TOKENS)
    assert (found.token_ids[2], found.cached_tokens[2]) == (whole.answers[0], 128)
    assert_same(backend, engine, whole)
    assert torch.equal(backend.state.kv_pool[:, engine.pool.match_prefix(whole.chain[:2])], before)


def test_preemption_changes_no_token_and_no_kv(checkpoint: Path, whole: Whole) -> None:
    backend = model_backend(checkpoint, **settings_of(MODULES, total_blocks=5))
    engine = engine_over(backend, MODULES, overlap="on", total_blocks=5)
    # The later request is preempted for the longer one.
    found = served(engine, [LONG, SHORT], TOKENS)
    assert found.token_ids == {0: whole.answers[0], 1: whole.answers[1]}
    assert_same(backend, engine, whole)


@pytest.mark.parametrize("captured", [False, True])
def test_modules_find_what_they_need_after_landed_blocks(
    checkpoint: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    fabric, graphs = Fabric(random.Random(1)), EagerGraphs(monkeypatch)
    backends, engines = [], []
    for receives in (True, False):
        backend = model_backend(checkpoint, **settings_of(MODULES))
        if captured and receives:
            graphs.give_to(backend, [4])
        agent: Any = FakeAgent(backend.kv_memory(), backend.namespace, fabric, layerwise_tokens=64)
        transfer = TransferConfig(layerwise_tokens=64)
        config = EngineConfig(model_dir=checkpoint, transfer=transfer, **settings_of(MODULES))
        backends.append(backend)
        engines.append(Engine(config, backend, time.monotonic, agent))
    assert backends[0].state.draft_states is not None
    backends[0].state.draft_states[:, : backends[0].total_blocks] = 7.0
    pair = Pair(fabric, *engines)
    pair.submit(submit_of(0, LONG, TOKENS, ignore_eos=True, remote_prefill=True))
    pair.run(random.Random(2))
    assert pair.transcript.token_ids[0] == whole.answers[0]
    assert bool(graphs.runs) == captured and not graphs.others
    assert_nothing_moves(pair)
    assert_same(backends[0], engines[0], whole)


def test_graphs_compute_the_same_kv(checkpoint: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = model_backend(checkpoint, **settings_of(MODULES))
    EagerGraphs(monkeypatch).give_to(backend, [2, 4])
    engine = engine_over(backend, MODULES, overlap="on")
    assert served(engine, [SHORT, LONG], TOKENS).token_ids == {0: whole.answers[1], 1: whole.answers[0]}
    assert_same(backend, engine, whole)


@pytest.mark.parametrize("shape", [StepShape(1, drafts=3), StepShape(40, decode_only=False, drafts=3)])
def test_a_dummy_step_writes_to_no_block_of_a_request(checkpoint: Path, shape: StepShape) -> None:
    backend = model_backend(checkpoint, **settings_of(MODULES))
    with torch.inference_mode():
        backend.state.kv_pool.fill_(0.5)
    assert execute(backend, Batch(0, ()), shape) == []
    written = (backend.state.kv_pool != 0.5).flatten(2).any(dim=2).any(dim=0)
    assert written.nonzero().flatten().tolist() == [backend.state.padding_block]


@pytest.mark.check("drafts")
def test_trained_modules_guess_right_and_wrong_and_change_no_token(tmp_path: Path) -> None:
    directory = with_modules(shipped_model(), tmp_path / "modules", 2)
    prompts = [random_prompt(length, seed=length) for length in (30, 64)]
    sampling = Sampling(temperature=0.7, seed=1)
    expected = served(engine_over(model_backend(directory, **settings_of(0)), 0), prompts, 40, sampling=sampling)
    backend = model_backend(directory, **settings_of(3))
    assert backend.namespace.draft_layers == 2
    found = served(engine_over(backend, 3, overlap="on"), prompts, 40, sampling=sampling)
    assert found.token_ids == expected.token_ids
    accepted = [sum(step.drafts.accepted[place] for step in found.steps if step.drafts) for place in range(3)]
    verified = [sum(step.drafts.verified[place] for step in found.steps if step.drafts) for place in range(3)]
    assert 0 < accepted[1] <= accepted[0] < verified[0]


def test_no_more_modules_are_loaded_than_tokens_are_guessed(checkpoint: Path) -> None:
    assert model_backend(checkpoint, **settings_of(1)).namespace.draft_layers == 1


def test_a_checkpoint_with_fewer_modules_than_it_says_is_refused(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.4.")]:
            del tensors[name]

    directory = tiny_checkpoint(tmp_path, num_nextn_predict_layers=2)
    rewrite_as_one_file(directory, drop)
    with pytest.raises(CheckpointError, match=r"holds no MTP module \(model\.layers\.4"):
        model_backend(directory, **settings_of(2))
    assert model_backend(directory, **settings_of(1)).namespace.draft_layers == 1

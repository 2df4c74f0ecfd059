"""Steps with prompts as captured pieces. Here the pieces run eagerly on a CPU; on a GPU they are graphs."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.model.context import SharedLatents
from engine.model.inputs import build_context
from engine.runner.backend import ModelBackend
from engine.runner.prompt_graphs import PromptGraphs
from engine.settings.device import Hardware, resolve
from engine.step.shape import shape_of
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import execute, model_backend, prompt_row, random_prompt, tiny_checkpoint
from tests.support.eager_graphs import EagerCapture, give_prompt_graphs, pad_steps
from tests.support.engines import Transcript, assert_at_rest, submit_of
from tests.support.errors import relative_error

KNOWN = random_prompt(100)
# New prompts, one of them in several chunks, and prompts after a known block.
PROMPTS = [
    random_prompt(30, seed=1),
    random_prompt(190, seed=2),
    [*KNOWN[:64], *random_prompt(70, seed=3)],
    [*KNOWN[:64], *random_prompt(5, seed=4)],
    random_prompt(61, seed=5),
]
SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=1), Sampling(prompt_logprobs=2), Sampling(), Sampling()]
TOKENS = 10
SIZES = [16, 48, 80]


def settings_of(next_n: int = 0) -> dict[str, Any]:
    return {"drafts": DraftsConfig(next_n=next_n), "max_step_tokens": 80, "max_requests": 8, "total_blocks": 64}


def served(backend: ModelBackend, next_n: int = 0, **settings: Any) -> Transcript:
    """Serve prompts that begin together, and others while requests decode."""
    config = EngineConfig(model_dir=Path("checkpoint"), **settings_of(next_n), **settings)
    engine = Engine(config, backend, time.monotonic)
    engine.submit(submit_of(99, KNOWN, 1))
    transcript = Transcript().run(engine)
    for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit(submit_of(key, prompt, TOKENS, sampling=sampling, ignore_eos=True))
        if key % 2:
            transcript.record(engine.step())
    transcript.run(engine)
    assert_at_rest(engine)
    return transcript


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Transcript:
    return served(model_backend(checkpoint, **settings_of()))


def assert_equal(found: Transcript, expected: Transcript) -> None:
    assert found.token_ids == expected.token_ids
    assert_near(found, expected, 1e-3)


def assert_near(found: Transcript, expected: Transcript, error: float) -> None:
    """The log probabilities of a prompt, which comes next to rows that decode."""
    ours, theirs = (
        [position.logprob for _, position in each.prompt_logprobs[2].positions()] for each in (found, expected)
    )
    assert ours == pytest.approx(theirs, abs=error)


@pytest.mark.parametrize(("overlap", "decoding"), [("off", 2), ("on", 8)])
@pytest.mark.parametrize("next_n", [0, 1])
def test_pieces_change_no_token(
    checkpoint: Path, expected: Transcript, next_n: int, overlap: str, decoding: int
) -> None:
    """decoding: tokens whose attention is captured, which are fewer than decode, or more."""
    backend = model_backend(checkpoint, **settings_of(next_n))
    capture = give_prompt_graphs(backend, SIZES, decoding)
    assert_equal(served(backend, next_n, overlap=overlap), expected)
    assert capture.runs > 5


def test_steps_of_more_tokens_are_not_captured(checkpoint: Path) -> None:
    backend = model_backend(checkpoint, **settings_of())
    capture = give_prompt_graphs(backend, SIZES[:2])
    runs = []
    for tokens in (80, 48):
        step(backend, tokens)
        runs.append(capture.runs)
    assert runs == [0, 1]


def test_each_layer_is_told_once_when_it_is_enqueued(checkpoint: Path) -> None:
    backend = model_backend(checkpoint, **settings_of())
    capture = give_prompt_graphs(backend, SIZES)
    assert step(backend, 70) == list(range(1, backend.weights.config.num_hidden_layers + 1))
    assert capture.runs


def test_pieces_of_a_quantized_model_write_the_same_kv(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dtype="float8", **WIDTHS)
    pools, captures = [], []
    for captured in (False, True):
        backend = model_backend(checkpoint, dtype="bfloat16", weights="quantized", **settings_of())
        if captured:
            captures.append(give_prompt_graphs(backend, SIZES))
        step(backend, 70)
        # Rows that attend in the absorbed form, and one that does not.
        rows = [prompt_row(random_prompt(80), 70, 75, range(4)), prompt_row(random_prompt(20), 0, 20, range(4, 5))]
        execute(backend, *rows)
        pools.append(backend.state.kv_pool[:, :5].float())
    assert captures[0].runs == 2 and relative_error(pools[1], pools[0]) < 1e-2


def test_pieces_of_divided_chunks_wait_for_other_ranks_latents(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has computed what this one's few tokens attend to, and each layer's latents come with the layer."""
    backend = model_backend(checkpoint, **settings_of())
    step(backend, 70)
    graphs = PromptGraphs(backend.weights, backend.state, [16], EagerCapture())
    # Pieces may have one token, as rows that decode do.
    rows = [prompt_row(random_prompt(80), *bounds, range(4), last=False) for bounds in ((70, 71), (71, 75))]
    context = build_context(backend.weights.config, rows, backend.state, 16)
    assert context.absorbed and not context.expanded
    pool = backend.state.kv_pool
    with torch.inference_mode():
        expected = backend.weights.hidden_states(context)
        computed = pool.clone()
        pool.zero_()
        monkeypatch.setattr(
            "engine.model.mla.exchange_kv", lambda context, shared, layer, everybody: pool[layer].copy_(computed[layer])
        )
        none = torch.empty(0, dtype=torch.int64)
        found = graphs.hidden_states(replace(context, shared_latents=SharedLatents(none, none, none)), None)
    torch.testing.assert_close(found[:5], expected[:5])


def step(backend: ModelBackend, tokens: int) -> list[int]:
    """How many layers are done by each report of a prompt's step, in order."""
    told: list[int] = []
    row = prompt_row(random_prompt(tokens), 0, tokens, range(4))
    launched = backend.launch(Batch(0, [row], told.append), shape_of([row]))
    launched.draw()
    launched.collect()
    return told


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("next_n", [0, 1])
def test_graphs_of_a_gpu_give_the_tokens_of_single_launches(checkpoint: Path, next_n: int, dtype: str) -> None:
    settings = {"model_dir": checkpoint, "dtype": dtype, "device": "cuda", "warm_up": "off", **settings_of(next_n)}
    found = []
    for tokens in (0, 80):
        resolved = resolve(EngineConfig(**settings, prompt_graph_tokens=tokens), Hardware(1, 1 << 30))
        backend = ModelBackend(resolved)
        graphs = backend.steps.batches.graphs
        assert (graphs is not None) is bool(tokens)
        # Both backends pad alike, so that they compute alike.
        pad_steps(backend, [16, 32, 48, 64, 80])
        found.append(served(backend, next_n, overlap="on"))
        told = step(backend, 70)
        # Layers that a GPU does between two looks of the host are reported together. The draft layer is reported too.
        assert told == sorted(set(told)) and told[-1] == backend.weights.config.num_hidden_layers + next_n
    if dtype == "float32":
        assert_equal(found[1], found[0])
    else:
        # Rows that decode are as many as a graph has, and kernels differ with that: some tokens are others.
        assert_near(found[1], found[0], 0.1)


@pytest.mark.gpu
def test_captured_steps_write_the_kv_of_eager_ones(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dtype="float8", **WIDTHS)
    settings = {"model_dir": checkpoint, "device": "cuda", "warm_up": "off", **settings_of()}
    pools = []
    for tokens in (0, 80):
        resolved = resolve(EngineConfig(**settings, prompt_graph_tokens=tokens), Hardware(1, 1 << 30))
        backend = ModelBackend(resolved)
        step(backend, 70)
        step(backend, 80)
        pools.append(backend.state.kv_pool[:, :4].float())
    assert torch.equal(*pools)


# Widths that are whole blocks of 128.
WIDTHS = {
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 256,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
}

"""Requests whose prompts are computed sparsely, in float32 on a small checkpoint, and in steps with exact ones."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, SparsePrefillConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.model.expanded_form import ExpandedForm
from engine.oracle.tokens import oracle_tokens
from kernels.sparse_prefill import Selection, select_lines
from mesh.blocks import BLOCK_TOKENS, chain_hashes
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill
from tests.support.checkpoints import model_backend, random_prompt, tiny_checkpoint
from tests.support.disaggregation import assert_nothing_moves, make_pair
from tests.support.engines import VOCABULARY, Transcript, assert_at_rest, prompt_of, submit_of
from tests.support.int4 import WIDE

FROM_TOKENS = 256
# A recall so low that the omission shows in the results.
SPARSE = SparsePrefill(FROM_TOKENS, 0.05)
PROMPT = random_prompt(800, seed=5)
SCORED = Sampling(top_logprobs=3)


class Worker:
    """A backend that engines use one after another. Each engine begins with an empty pool."""

    def __init__(self, checkpoint: Path, offers: bool = True, **settings: Any) -> None:
        sparse = SparsePrefillConfig(recall=SPARSE.recall if offers else None, from_tokens=FROM_TOKENS)
        settings = {"max_requests": 8, "total_blocks": 128, "sparse_prefill": sparse, **settings}
        self._settings = {"model_dir": checkpoint, **settings}
        self._backend = model_backend(checkpoint, **settings)
        self.start()

    def start(self, max_step_tokens: int = 256) -> "Worker":
        config = EngineConfig(**self._settings, max_step_tokens=max_step_tokens)
        self.engine = Engine(config, self._backend, time.monotonic)
        return self

    def run(self, *prompts: tuple[Sequence[int], SparsePrefill | None], max_tokens: int = 6) -> Transcript:
        """Run the prompts to their ends. Their keys count from 0."""
        for key, (prompt, sparse) in enumerate(prompts):
            submit = submit_of(key, prompt, max_tokens, sampling=SCORED, ignore_eos=True, sparse=sparse)
            self.engine.submit(submit)
        transcript = Transcript().run(self.engine)
        assert_at_rest(self.engine)
        return transcript

    def blocks(self, prompt: Sequence[int], sparse: SparsePrefill | None) -> torch.Tensor:
        """A copy of the cached blocks with the prompt's hashes: [layers, blocks, 64, latent]."""
        found = self.engine.pool.match_prefix(chain_hashes(prompt, sparse=sparse))
        return self._backend.state.kv_pool[:, found]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def offering(checkpoint: Path) -> Worker:
    return Worker(checkpoint)


@pytest.fixture
def worker(offering: Worker) -> Worker:
    return offering.start()


def keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have attention keep all lines. The engine's own choice only gives their number."""

    def select_all(*arguments: Any, **settings: Any) -> Selection:
        found = select_lines(*arguments, **settings)
        return Selection(torch.ones_like(found.columns), torch.ones_like(found.slashes))

    monkeypatch.setattr("engine.model.expanded_form.select_lines", select_all)


def test_hashes_differ_from_the_first_sparse_token_on() -> None:
    exact = chain_hashes(PROMPT, b"salt")
    for from_tokens, common in [(0, 0), (63, 0), (64, 1), (256, 4), (257, 4), (10_000, 12)]:
        found = chain_hashes(PROMPT, b"salt", SparsePrefill(from_tokens, 0.9))
        assert found[:common] == exact[:common] and not set(found[common:]) & set(exact)
    modes = [None, SparsePrefill(256, 0.9), SparsePrefill(256, 0.8), SparsePrefill(257, 0.9)]
    assert len({chain_hashes(PROMPT, b"salt", mode)[-1] for mode in modes}) == 4


def test_a_prompt_below_the_threshold_is_exact(worker: Worker) -> None:
    short = PROMPT[:FROM_TOKENS]
    found, blocks = worker.run((short, SPARSE)), worker.blocks(short, SPARSE)
    expected = worker.start().run((short, None))
    assert found.token_ids == expected.token_ids and found.logprobs == expected.logprobs
    assert torch.equal(blocks, worker.blocks(short, None))
    assert not any(step.sparse for step in found.steps)


def test_blocks_of_sparse_tokens_are_never_found_by_exact_requests(worker: Worker) -> None:
    # Cache the exact prefix first. The prompt then finds as long a prefix as after a sparse one, and lies in the same
    # blocks.
    worker.run((PROMPT[:FROM_TOKENS] + random_prompt(len(PROMPT) - FROM_TOKENS), None))
    expected, expected_blocks = worker.run((PROMPT, None)), worker.blocks(PROMPT, None)
    worker.start().run((PROMPT, SPARSE))
    sparse = worker.blocks(PROMPT, SPARSE)
    found, exact = worker.run((PROMPT, None)), worker.blocks(PROMPT, None)
    assert found.cached_tokens[0] == expected.cached_tokens[0] == FROM_TOKENS
    # All must be equal to the last bit.
    assert found.token_ids == expected.token_ids and found.logprobs == expected.logprobs
    assert torch.equal(exact, expected_blocks)
    # The comparison is meaningful only if sparse tokens have other KV after the first layer.
    assert torch.equal(exact[:, :4], sparse[:, :4]) and torch.equal(exact[0], sparse[0])
    assert not torch.allclose(exact[1:, 4:], sparse[1:, 4:], atol=1e-3)


def test_sparse_requests_change_no_token_of_exact_ones(worker: Worker) -> None:
    prompts = [random_prompt(length, seed=length) for length in (40, 300, 600)]
    expected = worker.run(*[(prompt, None) for prompt in prompts]).token_ids
    mixed = worker.start().run(*[(prompt, sparse) for prompt in prompts for sparse in (SPARSE, None)])
    assert [mixed.token_ids[key] for key in (1, 3, 5)] == [expected[key] for key in range(3)]


def test_sparse_requests_share_their_blocks(worker: Worker) -> None:
    first = worker.run((PROMPT, SPARSE))
    again = worker.run((PROMPT, SPARSE))
    assert (first.cached_tokens[0], again.cached_tokens[0]) == (0, len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert worker.run((PROMPT, SparsePrefill(FROM_TOKENS, 0.06))).cached_tokens[0] == FROM_TOKENS


def assert_nothing_is_left_out(worker: Worker, chunk: int) -> None:
    found = worker.start(chunk).run((PROMPT, SPARSE))
    expected = worker.start(chunk).run((PROMPT, None))
    assert found.token_ids == expected.token_ids
    pairs = zip(found.logprobs[0], expected.logprobs[0], strict=True)
    assert all(abs(one.logprob - other.logprob) < 1e-3 for one, other in pairs)
    measures = [measure for step in found.steps for measure in step.sparse]
    assert measures and all(measure.recall > 0.9999 and measure.density == 1 for measure in measures)


@pytest.mark.parametrize("chunk", [96, 250, 1024])
def test_attention_that_leaves_nothing_out_is_exact(
    worker: Worker, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are computed in several parts, and chunks begin and end anywhere."""
    keep_everything(monkeypatch)
    monkeypatch.setattr("engine.model.expanded_attention.HEADS_TOGETHER", 1)
    monkeypatch.setattr("engine.model.prompt_forms.EXPANDED_TOKENS", 192)
    assert_nothing_is_left_out(worker, chunk)


def test_attention_of_draft_layers_that_leaves_nothing_out_is_exact(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_everything(monkeypatch)
    assert_nothing_is_left_out(Worker(checkpoint, drafts=DraftsConfig(next_n=1)), 250)


def test_sparse_attention_that_keeps_all_keys_is_exact(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept attention is measured with the latents as they are stored."""
    keep_everything(monkeypatch)
    assert_nothing_is_left_out(Worker(checkpoint, kv_dtype="float8_e4m3fn"), 250)


def test_quantized_outputs_equal_those_of_measured_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the last bit in three layers, for an FP8 checkpoint computed in bfloat16 with heads in two parts."""
    monkeypatch.setattr("engine.model.prompt_forms.EXPANDED_TOKENS", 512)
    checkpoint = tiny_checkpoint(tmp_path, dtype="float8", num_attention_heads=16, **WIDE)
    worker = Worker(checkpoint, dtype="bfloat16", weights="quantized", kv_dtype="float8_e4m3fn")
    found, blocks = worker.run((PROMPT, SPARSE)), worker.blocks(PROMPT, SPARSE)
    monkeypatch.setattr(ExpandedForm, "measures", lambda *_: True)
    expected = worker.start().run((PROMPT, SPARSE))
    assert found.token_ids == expected.token_ids and found.logprobs == expected.logprobs
    assert torch.equal(blocks.float(), worker.blocks(PROMPT, SPARSE).float())
    assert [sum(len(step.sparse) for step in each.steps) for each in (found, expected)] == [2, 2 * 3]


def test_what_is_kept_is_measured(worker: Worker) -> None:
    transcript = worker.run((PROMPT, SPARSE))
    measures = [measure for step in transcript.steps for measure in step.sparse]
    # Each chunk after the threshold has a measure, except the last one, which is exact: absorbed attention is cheaper
    # for its few tokens.
    assert len(measures) == 2
    assert all(0.05 < measure.recall < 1 and 0 < measure.density < 1 for measure in measures)


def test_a_worker_without_the_offer_computes_exactly(checkpoint: Path) -> None:
    worker = Worker(checkpoint, offers=False)
    exact, asked = worker.run((PROMPT, None)), worker.run((PROMPT, SPARSE))
    assert asked.token_ids == exact.token_ids and asked.cached_tokens[0] == FROM_TOKENS
    assert torch.equal(worker.blocks(PROMPT, None), worker.blocks(PROMPT, SPARSE))


def test_a_sparse_prompt_moves_under_its_own_hashes() -> None:
    rng = random.Random(0)
    pair = make_pair(rng, max_step_tokens=128)
    prompt = prompt_of(600)
    # Exact and sparse requests share only the blocks before the threshold.
    for key, sparse in enumerate([None, SPARSE, SPARSE, None]):
        pair.submit(submit_of(key, prompt, 20, remote_prefill=True, sparse=sparse))
        assert pair.run(rng).transcript.token_ids[key] == oracle_tokens(prompt, 20, VOCABULARY)
    assert pair.transcript.cached_tokens[0] == 0
    assert [pair.transcript.cached_tokens[key] for key in (1, 2, 3)] == [FROM_TOKENS, 576, 576]
    for engine_ in (pair.decode, pair.prefill):
        for sparse in (None, SPARSE):
            assert len(engine_.pool.match_prefix(chain_hashes(prompt, sparse=sparse))) == 9
    assert_nothing_moves(pair)

"""Chunks of prompts that all ranks of a worker compute together, against transformers, in float32."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.batch import Row
from engine.config import EngineConfig, SparsePrefillConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.model.context import AbsorbedRows, ForwardContext
from engine.parallel.config import ParallelConfig
from engine.runner import prompt_graphs
from engine.runner.backend import ModelBackend
from engine.runner.spread import Division, Offer, chosen, offered
from engine.runner.spreading import Spread, Spreading
from engine.step.shape import StepShape
from kernels.sparse_prefill import Selection, select_lines
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill
from tests.support.checkpoints import GREEDY, random_prompt, tiny_checkpoint
from tests.support.eager_graphs import give_prompt_graphs
from tests.support.engines import Transcript, submit_of
from tests.support.layouts import run_layout
from tests.support.oracle_model import assert_greedy, load_oracle

# Layers of the small checkpoint.
LAYERS = 3


@pytest.mark.parametrize("next_n", [0, 2])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.check("layouts"))])
def test_a_prompt_that_all_ranks_compute_gets_transformers_tokens(
    tmp_path: Path, ranks: int, next_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank has whole chunks, a short last one by itself, and a prompt after cached blocks; another
    decodes.
    """
    divided: list[tuple[int, int]] = []

    class Watched(Spreading):
        def divide(self, rows: Sequence[Row], shape: StepShape) -> Spread | None:
            spread = super().divide(rows, shape)
            if spread is not None and spread.around is not None:
                divided.append((self.exchange.place.rank, len(spread.latents.slots)))
            return spread

    monkeypatch.setattr("engine.runner.backend.Spreading", Watched)
    checkpoint = tiny_checkpoint(tmp_path)
    parallel = ParallelConfig(tp=1, dp=ranks, ep=ranks, context_parallel_tokens=20, context_parallel_reach=2048)
    config = EngineConfig(
        model_dir=checkpoint, device="cpu", parallel=parallel, max_step_tokens=96, max_requests=8, total_blocks=64,
        threads=1, drafts=DraftsConfig(next_n=next_n),
    )  # fmt: skip
    prompts = {0: random_prompt(201, seed=1), 1: random_prompt(3, seed=2)}

    def between_steps(engine: Engine, transcript: Transcript) -> None:
        if 0 in transcript.ends and ranks not in prompts:
            prompts[ranks] = [*prompts[0], *random_prompt(90, seed=3)]
            engine.submit(submit_of(ranks, prompts[ranks], 6, ignore_eos=True))

    submits = [submit_of(0, prompts[0], 4, ignore_eos=True), submit_of(1, prompts[1], 30, ignore_eos=True)]
    transcript = run_layout(config, submits, between_steps)
    assert transcript.cached_tokens[ranks] == 192
    reference = load_oracle(checkpoint)
    for key, prompt in prompts.items():
        assert_greedy(reference, prompt, transcript.token_ids[key])
    # With drafts the first tokens after cached blocks are computed again, and their chunk is not divided.
    assert len(divided) >= (2 if next_n else 3)
    assert {rank for rank, _ in divided} == {0} and min(tokens for _, tokens in divided) >= 20


def test_captured_steps_divide_a_prompt_next_to_short_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first rank's prompts are divided, the second decodes, and computes what a prompt adds to cached KV."""
    taken: list[int] = []
    take = prompt_graphs._DecodingRows.take

    def noted(rows: prompt_graphs._DecodingRows, context: ForwardContext) -> list[AbsorbedRows]:
        left = take(rows, context)
        if context.shared_latents is not None:
            taken.extend(each.plan.query_tokens for each in context.absorbed[: len(context.absorbed) - len(left)])
        return left

    monkeypatch.setattr(prompt_graphs._DecodingRows, "take", noted)
    checkpoint = tiny_checkpoint(tmp_path)
    long, short = random_prompt(500, seed=1), random_prompt(70, seed=2)
    prompts = {
        0: long,
        1: short,
        2: [*long[:64], *random_prompt(24, seed=3)],
        3: [*short[:64], *random_prompt(12, seed=4)],
    }
    submits = {
        key: submit_of(key, prompt, 20, sampling=Sampling(top_logprobs=1), ignore_eos=True)
        for key, prompt in prompts.items()
    }

    def config_of(parallel: ParallelConfig) -> EngineConfig:
        return EngineConfig(
            model_dir=checkpoint, device="cpu", parallel=parallel, max_step_tokens=96, max_requests=8, total_blocks=64,
            threads=1,
        )  # fmt: skip

    def between_steps(engine: Engine, transcript: Transcript) -> None:
        for key, later in ((0, 2), (1, 3)):
            if key in transcript.token_ids and later in submits:
                engine.submit(submits.pop(later))

    def prepare(backend: ModelBackend) -> None:
        give_prompt_graphs(backend, [16, 32, 64, 96], decoding=16)

    alone = run_layout(config_of(ParallelConfig()), list(submits.values())).logprobs
    divided = ParallelConfig(tp=1, dp=2, ep=2, context_parallel_tokens=20, context_parallel_reach=2048)
    transcript = run_layout(config_of(divided), [submits.pop(0), submits.pop(1)], between_steps, prepare)
    assert (transcript.cached_tokens[2], transcript.cached_tokens[3]) == (64, 64)
    # Rows that decode were captured in such steps, and no pieces.
    assert set(taken) == {1}
    for key, expected in alone.items():
        found = [each.logprob for each in transcript.logprobs[key]]
        assert found == pytest.approx([each.logprob for each in expected], abs=1e-4)


def test_all_ranks_compute_a_sparse_prompt_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 512 tokens is four pieces, two on each rank. After the first two, half of the attention is left
    out.
    """
    by_thread: Counter[int] = Counter()

    def counted(*arguments: Any, **settings: Any) -> Selection:
        by_thread[threading.get_ident()] += 1
        return select_lines(*arguments, **settings)

    monkeypatch.setattr("engine.model.expanded_form.select_lines", counted)
    sparse = SparsePrefillConfig(recall=0.5, from_tokens=200)
    checkpoint = tiny_checkpoint(tmp_path)
    prompt, scored = random_prompt(1024, seed=1), Sampling(top_logprobs=3)

    def logprobs(parallel: ParallelConfig, step_tokens: int, mode: SparsePrefill | None) -> list[float]:
        config = EngineConfig(
            model_dir=checkpoint, device="cpu", parallel=parallel, max_step_tokens=step_tokens, max_requests=8,
            total_blocks=64, threads=1, sparse_prefill=sparse,
        )  # fmt: skip
        by_thread.clear()
        submit = submit_of(0, prompt, 4, ignore_eos=True, sparse=mode, sampling=scored)
        return [each.logprob for each in run_layout(config, [submit]).logprobs[0]]

    divided = logprobs(
        ParallelConfig(tp=1, dp=2, ep=2, context_parallel_tokens=128, context_parallel_reach=2048), 512, sparse.offered
    )
    # The first of eight pieces is exact.
    assert sorted(by_thread.values()) == [3 * LAYERS, 4 * LAYERS]
    alone = logprobs(ParallelConfig(tp=1, dp=1), 128, sparse.offered)
    assert divided == pytest.approx(alone, abs=1e-4)
    # The comparison is meaningful only if attention was left out.
    assert logprobs(ParallelConfig(tp=1, dp=1), 128, None) != pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_divide_a_chunk_by_pieces_from_both_ends(ranks: int) -> None:
    for tokens in [*range(1, 40), 1000]:
        division = Division(tokens, ranks)
        shares: list[int | None] = []
        for rank in range(ranks):
            for begin, end in division.pieces(rank):
                piece = list(range(begin, end))
                shares += [*piece, *[None] * (division.piece_tokens - len(piece))]
        assert [shares[place] for place in division.places()] == list(range(tokens))
        assert len(shares) == ranks * division.share_tokens
    whole = Division(16 * ranks, ranks)
    assert {sum(begin + end for begin, end in whole.pieces(rank)) for rank in range(ranks)} == {32 * ranks}


def test_the_longest_chunk_is_divided_if_steps_get_shorter() -> None:
    assert chosen([Offer(100, 5), Offer(0, 9)]) == 0
    assert chosen([Offer(0, 0), Offer(60, 0), Offer(60, 4), Offer(0, 0)]) is None
    assert chosen([Offer(0, 0), Offer(60, 0), Offer(80, 0), Offer(20, 0)]) is None
    assert chosen([Offer(0, 0), Offer(20, 0), Offer(80, 4), Offer(20, 0)]) == 2
    assert chosen([Offer(0, 100), Offer(0, 0)]) is None
    # All ranks have as much, so that none waits for another.
    assert chosen([Offer(90, 0), Offer(90, 0)]) is None


def test_decoding_rows_and_known_tokens_are_not_divided() -> None:
    def row(tokens: int, drafts: int = 0, shared: int = 0) -> Row:
        return Row([0] * tokens, 0, [0], GREEDY, drafts=drafts, shared=shared)

    assert offered([row(4, drafts=3), row(3), row(9), row(9), row(50, shared=1)], 4, 1000) == 2
    assert offered([row(4, drafts=3), row(3)], 4, 1000) is None and offered([], 1, 1000) is None

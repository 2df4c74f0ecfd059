"""Penalties and biases on a real checkpoint, in fp32: the same tokens however and wherever a request is run."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM, RepetitionPenaltyLogitsProcessor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.messages import Submit
from engine.runner.token_counts import TokenCounts
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import model_backend, random_prompt, tiny_checkpoint
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, assert_at_rest, submit_of

# If the best two logits are closer, rounding may choose.
MARGIN = 1e-3
TOKENS = 70
PENALIZED = Sampling(
    presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.3, logit_bias={20: 0.5, 21: -9.0}
)
SAMPLINGS = [
    PENALIZED,
    Sampling(temperature=0.9, seed=1, frequency_penalty=1.5, min_p=0.02),
    Sampling(temperature=1.2, seed=2),
    Sampling(repetition_penalty=0.8, temperature=0.7, top_k=20, seed=3),
    Sampling(logit_bias={33: 3.0}),
]
PROMPTS = [random_prompt(length, seed=length) for length in (40, 63, 64, 90, 5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=1)


def submits() -> list[Submit]:
    pairs = zip(PROMPTS, SAMPLINGS, strict=True)
    return [
        submit_of(key, prompt, TOKENS, sampling=sampling, ignore_eos=True)
        for key, (prompt, sampling) in enumerate(pairs)
    ]


def engine_over(checkpoint: Path, graphs: EagerGraphs | None = None, **settings: Any) -> Engine:
    settings = {"max_step_tokens": 96, "max_requests": 8, "total_blocks": 64, **settings}
    config, backend = EngineConfig(model_dir=checkpoint, **settings), model_backend(checkpoint, **settings)
    if graphs is not None:
        graphs.give_to(backend, [2, 8])
    return Engine(config, backend, time.monotonic)


def run(checkpoint: Path, submitted: list[Submit], **settings: Any) -> Transcript:
    engine = engine_over(checkpoint, **settings)
    for submit in submitted:
        engine.submit(submit)
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> dict[int, list[int]]:
    return run(checkpoint, submits(), overlap="off").token_ids


def changed(logits: torch.Tensor, prompt: list[int], generated: list[int], sampling: Sampling) -> torch.Tensor:
    """One row of logits as transformers and OpenAI would change it."""
    tokens = torch.tensor([[*prompt, *generated]])
    logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(tokens, logits.unsqueeze(0).clone())[0]
    for token_id, times in Counter(generated).items():
        logits[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    return logits


def test_greedy_tokens_are_the_best_after_penalties_and_bias(
    checkpoint: Path, undisturbed: dict[int, list[int]]
) -> None:
    reference = DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt, tokens = PROMPTS[0], undisturbed[0]
    with torch.inference_mode():
        every = reference(torch.tensor([[*prompt, *tokens]])).logits[0][len(prompt) - 1 : -1]
    decided = 0
    for position, logits in enumerate(every):
        best = changed(logits, prompt, tokens[:position], PENALIZED).topk(2)
        if best.values[0] - best.values[1] > MARGIN:
            assert tokens[position] == best.indices[0]
            decided += 1
    assert decided > 0.9 * TOKENS
    plain = every.argmax(dim=1).tolist()
    assert sum(one != other for one, other in zip(tokens, plain, strict=True)) > TOKENS / 4


def test_a_step_launched_before_the_last_is_read_counts_right(
    checkpoint: Path, undisturbed: dict[int, list[int]]
) -> None:
    assert run(checkpoint, submits(), overlap="on").token_ids == undisturbed


def test_a_graph_leaves_rows_with_penalties_to_be_drawn(
    checkpoint: Path, undisturbed: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph stores each row's likeliest token where the next step reads what it follows."""
    graphs = EagerGraphs(monkeypatch)
    engine = engine_over(checkpoint, graphs, overlap="on")
    for submit in submits():
        engine.submit(submit)
    assert Transcript().run(engine).token_ids == undisturbed
    assert graphs.runs > TOKENS / 2


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_preemption_changes_no_token(checkpoint: Path, undisturbed: dict[int, list[int]], overlap: str) -> None:
    engine = engine_over(checkpoint, overlap=overlap, total_blocks=6)
    for submit in submits():
        engine.submit(submit)
    transcript, preempted = Transcript(), False
    while engine.has_work():
        transcript.record(engine.step())
        started = len(transcript.token_ids) - len(transcript.ends)
        preempted = preempted or engine.load().running_requests < started
    assert preempted
    assert transcript.token_ids == undisturbed


def test_counts_made_room_for_others_and_are_made_again(
    checkpoint: Path, undisturbed: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are taken away as if there were only enough for one step's rows, so that requests now and then find their
    counts gone.
    """
    penalize = TokenCounts.penalize

    def forget_and_penalize(self: TokenCounts, logits: torch.Tensor, rows: Any, drafts: torch.Tensor | None) -> None:
        for slot in self._slots.values():
            slot.position = None
        penalize(self, logits, rows, drafts)

    monkeypatch.setattr(TokenCounts, "penalize", forget_and_penalize)
    # Without overlap, since a row that follows another had its counts in the step before.
    assert run(checkpoint, submits(), overlap="off").token_ids == undisturbed


def test_another_worker_continues_with_the_same_counts(checkpoint: Path, undisturbed: dict[int, list[int]]) -> None:
    delivered = 25
    continued = [
        submit_of(
            key,
            [*prompt, *undisturbed[key][:delivered]],
            TOKENS - delivered,
            sampling=sampling,
            ignore_eos=True,
            prompt_tokens=len(prompt),
        )
        for key, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    tokens = run(checkpoint, continued).token_ids
    assert tokens == {key: expected[delivered:] for key, expected in undisturbed.items()}


def test_log_probabilities_are_those_of_the_model_itself(checkpoint: Path) -> None:
    plain = Sampling(top_logprobs=10_000)
    biased = Sampling(top_logprobs=10_000, logit_bias={50: 100.0}, repetition_penalty=2.0)
    both = [submit_of(key, PROMPTS[0], 1, sampling=sampling) for key, sampling in enumerate((plain, biased))]
    transcript = run(checkpoint, both)
    (expected,), (found,) = transcript.logprobs[0], transcript.logprobs[1]
    assert transcript.token_ids[1] == [50]
    assert dict(found.top) == pytest.approx(dict(expected.top))
    assert found.logprob == pytest.approx(dict(expected.top)[50])


def test_a_step_that_asks_for_no_penalty_touches_no_counts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TokenCounts, "penalize")
    monkeypatch.delattr(TokenCounts, "count_yields")
    plain = [submit_of(key, prompt, 5, sampling=Sampling(temperature=1.0)) for key, prompt in enumerate(PROMPTS)]
    assert len(run(checkpoint, plain).ends) == len(PROMPTS)

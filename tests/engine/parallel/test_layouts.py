"""A model divided over ranks in every way against the same model on one rank and transformers, in float32."""

import time
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import DeepseekV3ForCausalLM

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.protocol.messages import Cancel, Submit
from engine.runner.backend import ModelBackend
from mesh.domain.outputs import FinishReason
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.eager_graphs import EagerGraphs
from tests.support.engines import Transcript, submit_of
from tests.support.layouts import run_layout
from tests.support.oracle_model import assert_greedy, load_oracle

# On both sides of the block's 64 tokens and of chunks of 96; one prompt begins as another does.
LENGTHS = (1, 63, 65, 130, 200)
PROMPTS = [*(random_prompt(length, seed=length) for length in LENGTHS), [*random_prompt(200, seed=200), 9, 9, 9]]
ALONE = ParallelConfig()
TwoBatchMode = Literal["off", "on"]
TWO_BATCH: tuple[TwoBatchMode, ...] = ("off", "on")
# tp, dp and ep.
LAYOUTS = [(2, 1, 1), (2, 1, 2), (4, 1, 2), (1, 2, 1), (1, 2, 2), (1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 2, 2), (2, 2, 4)]
MOST_DP = 4
ON_TWO_HOSTS = [(1, 2, 1), (1, 2, 2), (1, 4, 2), (1, 4, 4), (2, 2, 2), (2, 2, 4)]


def layouts(*fast: tuple[tuple[int, int, int], TwoBatchMode, int]) -> pytest.MarkDecorator:
    """All layouts, with whole steps and with two micro-batches, without drafts and with them. Those not in `fast` run
    with `make check-layouts`.
    """
    cases = [
        pytest.param(
            ParallelConfig(tp=tp, dp=dp, ep=ep, two_batch=two),
            next_n,
            marks=() if ((tp, dp, ep), two, next_n) in fast else pytest.mark.check("layouts"),
            id=f"tp {tp}, dp {dp}, ep {ep}, {'in two' if two == 'on' else 'whole'}, {next_n} drafts",
        )
        for (tp, dp, ep), two, next_n in product(LAYOUTS, TWO_BATCH, (0, 2))
    ]
    return pytest.mark.parametrize(("layout", "next_n"), cases)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return load_oracle(checkpoint)


def config_of(checkpoint: Path, parallel: ParallelConfig = ALONE, **settings: Any) -> EngineConfig:
    settings = {"max_step_tokens": 96, "max_requests": 8, "total_blocks": 64, "threads": 1, **settings}
    return EngineConfig(model_dir=checkpoint, device="cpu", parallel=parallel, **settings)


def submits_of(prompts: list[list[int]], tokens: int, temperature: float = 0.0) -> list[Submit]:
    return [
        submit_of(key, prompt, tokens, sampling=Sampling(temperature=temperature, seed=key), ignore_eos=True)
        for key, prompt in enumerate(prompts)
    ]


@layouts(
    ((2, 1, 1), "off", 2), ((1, 2, 2), "off", 0), ((2, 2, 2), "off", 2), ((1, 2, 2), "on", 2), ((2, 2, 2), "on", 0)
)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Path, reference: DeepseekV3ForCausalLM, layout: ParallelConfig, next_n: int
) -> None:
    transcript = run_layout(config_of(checkpoint, layout, drafts=DraftsConfig(next_n=next_n)), submits_of(PROMPTS, 8))
    assert transcript.ends.keys() == set(range(len(PROMPTS)))
    for key, prompt in enumerate(PROMPTS):
        assert_greedy(reference, prompt, transcript.token_ids[key])


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each == (2, 2, 4) else pytest.mark.check("layouts")) for each in ON_TWO_HOSTS],
)
def test_greedy_tokens_of_two_hosts_are_those_of_transformers(
    checkpoint: Path, reference: DeepseekV3ForCausalLM, layout: tuple[int, int, int]
) -> None:
    tp, dp, ep = layout
    parallel = ParallelConfig(tp=tp, dp=dp, ep=ep, hosts=2, two_batch="on")
    transcript = run_layout(config_of(checkpoint, parallel, drafts=DraftsConfig(next_n=2)), submits_of(PROMPTS, 8))
    for key, prompt in enumerate(PROMPTS):
        assert_greedy(reference, prompt, transcript.token_ids[key])


@pytest.mark.check("layouts")
@pytest.mark.parametrize(("experts", "ranks"), [(8, 10), (32, 40)])
def test_more_ranks_than_experts_hold_one_each(experts: int, ranks: int, tmp_path: Path) -> None:
    """In the proportion of 256 experts with 64 copies on 320 ranks."""
    checkpoint = tiny_checkpoint(tmp_path, n_routed_experts=experts, num_hidden_layers=2, num_nextn_predict_layers=0)
    transcript = run_layout(config_of(checkpoint, ParallelConfig(dp=ranks), total_blocks=8), submits_of(PROMPTS, 8))
    reference = load_oracle(checkpoint)
    for key, prompt in enumerate(PROMPTS):
        assert_greedy(reference, prompt, transcript.token_ids[key])


def seeded_submits(ranks: int) -> list[Submit]:
    """Three requests for each DP rank. Each begins in one block and grows into a second."""
    prompts = [random_prompt(56 + key % 6, seed=key) for key in range(3 * ranks)]
    return submits_of(prompts, 10, temperature=0.8)


@pytest.fixture(scope="module")
def seeded(checkpoint: Path) -> dict[int, list[int]]:
    """The tokens of one rank."""
    return run_layout(config_of(checkpoint), seeded_submits(MOST_DP)).token_ids


@layouts(((2, 1, 1), "off", 0), ((1, 2, 2), "on", 0), ((2, 2, 2), "off", 2))
def test_preempted_and_cancelled_requests_keep_one_ranks_seeded_tokens(
    checkpoint: Path, seeded: dict[int, list[int]], layout: ParallelConfig, next_n: int
) -> None:
    ranks, preempted = Layout.of(layout).dp, set[Engine]()

    def between_steps(engine: Engine, transcript: Transcript) -> None:
        if 0 in transcript.token_ids and 0 not in transcript.ends:
            engine.cancel(Cancel(0))
        if engine.load().running_requests < len(transcript.token_ids) - len(transcript.ends):
            preempted.add(engine)

    config = config_of(checkpoint, layout, drafts=DraftsConfig(next_n=next_n), total_blocks=3)
    found = run_layout(config, seeded_submits(ranks), between_steps)
    assert len(preempted) == ranks
    assert found.ends[0].finish is FinishReason.CANCELLED
    assert found.token_ids[0] == seeded[0][: len(found.token_ids[0])]
    assert all(found.token_ids[key] == seeded[key] for key in range(1, 3 * ranks))


class SecondTurns:
    """Second prompts, which continue the answers to the first ones."""

    def __init__(self) -> None:
        self.prompts: dict[int, list[int]] = {}

    def submit(self, engine: Engine, transcript: Transcript) -> None:
        for key in transcript.ends.keys() & set(range(len(PROMPTS))):
            if 100 + key not in self.prompts:
                prompt = self.prompts[100 + key] = [*PROMPTS[key], *transcript.token_ids[key], 9]
                engine.submit(submit_of(100 + key, prompt, 8, ignore_eos=True))

    def check(self, transcript: Transcript, reference: DeepseekV3ForCausalLM) -> None:
        assert transcript.ends.keys() >= self.prompts.keys()
        for key, prompt in self.prompts.items():
            assert transcript.cached_tokens[key] == (len(prompt) - 2) // 64 * 64
            assert_greedy(reference, prompt, transcript.token_ids[key])


@layouts(((2, 1, 1), "off", 0), ((1, 2, 2), "on", 2), ((2, 2, 2), "on", 0))
def test_a_second_turn_gets_the_tokens_of_transformers(
    checkpoint: Path, reference: DeepseekV3ForCausalLM, layout: ParallelConfig, next_n: int
) -> None:
    config, second = config_of(checkpoint, layout, drafts=DraftsConfig(next_n=next_n)), SecondTurns()
    transcript = run_layout(config, submits_of(PROMPTS, 2), second.submit)
    second.check(transcript, reference)


def test_an_idle_rank_stops_though_another_is_always_first(checkpoint: Path) -> None:
    steps_without_requests = 0

    def between_steps(engine: Engine, transcript: Transcript) -> None:
        nonlocal steps_without_requests
        if 1 in transcript.ends:
            steps_without_requests += 1
            # Otherwise the test would have no end.
            assert steps_without_requests < 10
            # Give the other rank time to come to the next step.
            time.sleep(0.05)

    run_layout(config_of(checkpoint, ParallelConfig(dp=2)), submits_of(PROMPTS[:2], 4), between_steps)
    assert steps_without_requests == 1


@layouts(((1, 2, 2), "off", 0), ((2, 2, 2), "off", 2))
def test_ranks_compute_second_turns_in_graphs_they_agree_on(
    checkpoint: Path,
    reference: DeepseekV3ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    layout: ParallelConfig,
    next_n: int,
) -> None:
    graphs, second = EagerGraphs(monkeypatch), SecondTurns()
    config = config_of(checkpoint, layout, drafts=DraftsConfig(next_n=next_n), max_requests=64, max_step_tokens=256)

    def prepare(backend: ModelBackend) -> None:
        graphs.give_to(backend, [8, 32])

    transcript = run_layout(config, submits_of(PROMPTS, 2), second.submit, prepare)
    second.check(transcript, reference)
    # Steps without graphs are those of the first prompts, which all ranks compute at once, and with drafts those of
    # second turns without a cached block.
    assert graphs.others and all(shape.tokens > 128 or shape.beginning for shape in graphs.others)

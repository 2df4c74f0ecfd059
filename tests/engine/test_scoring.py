import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from engine.balance.report import BalanceReport
from engine.batch import Batch, Row, Sample
from engine.pace.step_times import StepTimes
from engine.protocol.messages import SparseMeasure
from engine.requests.thinking import ThinkTokens
from engine.scoring import ScoringConfig, main, token_logprobs
from engine.step.shape import StepShape
from mesh.blocks import BLOCK_TOKENS
from mesh.config_values import load
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.outputs import Logprobs, PromptLogprobs
from mesh.domain.sampling import Sampling
from mesh.domain.workers import WorkerSpeed
from mesh.errors import ConfigError
from tests.support.checkpoints import execute, model_backend, random_prompt, tiny_checkpoint
from transfer.memory import KvMemory

VOCABULARY = 40


class CountingBackend:
    """Finds token k after token j with a probability proportional to 1 + (j + k) mod 7, whatever came before."""

    model = "counting"
    namespace = KvNamespace("", "", 1, "")
    context_tokens = 300
    vocabulary_size = VOCABULARY
    block_bytes = 64
    eos_token_ids: frozenset[int] = frozenset()
    asynchronous = False
    device_name = "counting"
    draft_layers = 0
    captured_rows = captured_prompt_tokens = 0
    think_tokens: ThinkTokens | None = None
    step_times: StepTimes | None = None
    speed: WorkerSpeed | None = None
    balance: BalanceReport | None = None

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self.most_rows = 0

    def kv_memory(self) -> KvMemory:
        raise AssertionError("a score moves no KV")

    def host_slots(self) -> None:
        """None: a score evicts nothing."""

    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        raise AssertionError("there are no draft layers")

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        raise AssertionError("a score reports nothing else")

    def launch(self, batch: Batch, shape: StepShape) -> "CountedStep":
        owned = [block for row in batch.rows for block in row.block_ids]
        assert len(set(owned)) == len(owned), "two texts share a block"
        assert all(0 <= block < self.total_blocks for block in owned)
        self.most_rows = max(self.most_rows, len(batch.rows))
        return CountedStep([Sample([0], [self._logprobs(row.token_ids[-1])]) for row in batch.rows])

    def _logprobs(self, previous: int) -> Logprobs:
        order = sorted(range(VOCABULARY), key=lambda token_id: -((previous + token_id) % 7))
        return Logprobs(0.0, order, [expected(previous, token_id) for token_id in order])


class CountedStep:
    def __init__(self, samples: list[Sample | None]) -> None:
        self._samples = samples

    def draw(self) -> None:
        pass

    def collect(self) -> list[Sample | None]:
        return self._samples

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        return {}


def expected(previous: int, token_id: int) -> float:
    total = sum(1 + (previous + other) % 7 for other in range(VOCABULARY))
    return math.log((1 + (previous + token_id) % 7) / total)


def texts_of(*lengths: int) -> list[list[int]]:
    return [[(index + 3 * place) % VOCABULARY for place in range(length)] for index, length in enumerate(lengths)]


def test_every_token_but_the_first_is_scored() -> None:
    texts = texts_of(3, 130, 0, 1, 70, 2)
    scores = token_logprobs(CountingBackend(total_blocks=8), texts, most_rows=4)
    assert scores == [[expected(a, b) for a, b in pairwise(text)] for text in texts]


@pytest.mark.parametrize(("total_blocks", "most_rows", "together"), [(64, 3, 3), (3, 64, 3), (64, 64, 10)])
def test_texts_run_together_as_far_as_rows_and_blocks_allow(total_blocks: int, most_rows: int, together: int) -> None:
    backend = CountingBackend(total_blocks)
    token_logprobs(backend, texts_of(*[BLOCK_TOKENS] * 10), most_rows)
    assert backend.most_rows == together


@pytest.mark.parametrize(
    ("text", "complaint"),
    [([1] * 301, "does not fit the context"), ([1] * 129, "does not fit"), ([VOCABULARY], "outside the vocabulary")],
)
def test_a_text_that_cannot_be_scored_is_refused(text: list[int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        token_logprobs(CountingBackend(total_blocks=2), [text], most_rows=4)


def prefilled_logprob(backend_dir: Path, text: Sequence[int], position: int) -> float:
    """The log probability of the token at `position`, from the logits after a prompt of the tokens before it."""
    backend = model_backend(backend_dir)
    (sample,) = execute(backend, Row(text[:position], 0, range(8), Sampling(top_logprobs=backend.vocabulary_size)))
    assert sample is not None and sample.logprobs is not None
    return dict(zip(sample.logprobs[0].top_token_ids, sample.logprobs[0].top_logprobs, strict=True))[text[position]]


async def test_the_model_scores_a_text_as_its_prefill_would(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "model")
    texts = [random_prompt(90, seed=1), random_prompt(20, seed=2)]
    (tmp_path / "texts").write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = ["engine.model_dir=" + str(directory), "engine.device=cpu", "engine.total_blocks=8"]
    files = [f"texts={tmp_path / 'texts'}", f"scores={tmp_path / 'scores'}"]
    await main(load(ScoringConfig, None, settings + files))
    first, second = (json.loads(line) for line in (tmp_path / "scores").read_text().splitlines())
    assert (len(first), len(second)) == (89, 19)
    for scores, text, position in ((first, texts[0], 70), (first, texts[0], 89), (second, texts[1], 2)):
        assert scores[position - 1] == pytest.approx(prefilled_logprob(directory, text, position), abs=1e-4)

"""The log probabilities of prompts equal those of transformers, however the prompt is computed."""

import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.protocol.messages import Submit
from engine.requests.request import PromptScores
from launcher.shipped_model import shipped_model
from mesh.domain.outputs import PromptLogprobs
from mesh.domain.sampling import MAX_PROMPT_LOGPROBS, Sampling
from tests.engine.test_engine_parity import engine_over
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.disaggregation import make_pair
from tests.support.engines import Transcript, prompt_of, submit_of
from tests.support.oracle_model import load_oracle, write_dequantized

# On both sides of the block's 64, of chunks of 96 tokens, and of the 64 tokens whose logits are there at once.
LENGTHS = (1, 2, 63, 64, 65, 97, 129, 193, 300)
COUNT = 3


def submits_of(prompts: list[list[int]], **changes: Any) -> list[Submit]:
    sampling = Sampling(prompt_logprobs=COUNT, **changes)
    return [submit_of(key, prompt, 4, sampling=sampling, ignore_eos=True) for key, prompt in enumerate(prompts)]


def scores_of(engine: Engine, submits: list[Submit]) -> dict[int, PromptLogprobs]:
    """The prompt's log probabilities by request. Each must come once, with the first token."""
    for submit in submits:
        engine.submit(submit)
    found: dict[int, PromptLogprobs] = {}
    while engine.has_work():
        result = engine.step()
        for output in result.outputs if result else ():
            assert output.refusal is None
            if output.prompt_logprobs is not None:
                assert output.cached_tokens == 0 and output.key not in found
                found[output.key] = output.prompt_logprobs
    return found


@torch.inference_mode()
def assert_as_transformers(reference: DeepseekV3ForCausalLM, prompt: list[int], found: PromptLogprobs) -> None:
    """Assert equal values and ranks within rounding of float32. If two tokens are closer, either may rank first."""
    every = torch.log_softmax(reference(torch.tensor([prompt])).logits[0, :-1].double(), dim=1)
    own = every.gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
    best = every.topk(COUNT, dim=1)
    assert found.fits and len(found.logprobs) == 4 * (len(prompt) - 1)
    for index, (rank, entry) in enumerate(found.positions()):
        assert entry.logprob == pytest.approx(own[index].item(), abs=1e-3)
        assert entry.top_logprobs == pytest.approx(best.values[index].tolist(), abs=1e-3)
        assert every[index, entry.top_token_ids].tolist() == pytest.approx(best.values[index].tolist(), abs=1e-3)
        least = 1 + int((every[index] > own[index] + 1e-3).sum())
        assert least <= rank <= int((every[index] > own[index] - 1e-3).sum())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.mark.parametrize("next_n", [0, 2])
def test_prompts_batched_and_chunked_are_scored_as_by_transformers(
    checkpoint: Path, reference: DeepseekV3ForCausalLM, next_n: int
) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    engine = engine_over(checkpoint, next_n)
    found = scores_of(engine, submits_of(prompts))
    assert sorted(found) == list(range(len(prompts)))
    for key, prompt in enumerate(prompts):
        assert_as_transformers(reference, prompt, found[key])
    # All prompts are cached now, and are scored as before.
    assert scores_of(engine, submits_of(prompts)).keys() == found.keys()


def test_the_shipped_models_prompts_are_scored_as_by_transformers(tmp_path: Path) -> None:
    # Its experts are in FP8, which transformers does not support on a CPU.
    reference = load_oracle(write_dequantized(shipped_model(), tmp_path / "float32"))
    engine = engine_over(shipped_model(), dtype="float32", device="cpu")
    prompts = [random_prompt(length, seed=length) for length in (70, 150)]
    for key, found in scores_of(engine, submits_of(prompts)).items():
        assert_as_transformers(reference, prompts[key], found)


def test_a_prompt_that_begins_again_is_scored_from_its_begin() -> None:
    scores = PromptScores(0)
    for start, part in ((0, b"1111"), (64, b"2222"), (0, b"3333"), (96, b"4444")):
        scores.add(start, PromptLogprobs(0, part, part))
    assert scores.whole() == PromptLogprobs(0, b"33334444", b"33334444")


def test_a_request_with_delivered_tokens_is_not_scored_again() -> None:
    submit = submits_of([prompt_of(100)])[0]
    request = msgspec.structs.replace(submit.request, prompt_tokens=90)
    engine = make_pair(random.Random(0)).prefill
    assert scores_of(engine, [msgspec.structs.replace(submit, request=request)]) == {}


def test_a_prompt_too_long_for_its_scores_is_refused() -> None:
    engine = make_pair(random.Random(0), prefill={"total_blocks": 8192}).prefill
    sampling = Sampling(prompt_logprobs=20)
    engine.submit(submit_of(1, [1] * (MAX_PROMPT_LOGPROBS // 21 + 1), 1, sampling=sampling))
    (output,) = Transcript().run(engine).ends.values()
    assert "log probabilities" in str(output)


@pytest.mark.parametrize("length", [1, 64, 65, 300])
def test_a_prefill_worker_scores_the_prompt_for_the_decode_worker(length: int) -> None:
    pair = make_pair(random.Random(length), OracleBackend, max_step_tokens=128)
    # The second time all of it is cached on both sides.
    for key in (1, 2):
        sampling = Sampling(prompt_logprobs=COUNT)
        pair.submit(submit_of(key, prompt_of(length), 5, sampling=sampling, remote_prefill=True))
        found = pair.run(random.Random(1)).transcript.prompt_logprobs[key]
        assert found.fits
        # The oracle's likeliest token is the prompt's own.
        assert array("I", found.top_token_ids)[::COUNT].tolist() == prompt_of(length)[1:]

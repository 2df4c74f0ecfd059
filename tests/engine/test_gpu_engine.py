"""The engine on a GPU: graphs and overlap give the tokens of steps that run one by one, and those of the CPU."""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.backend import execute
from engine.batch import Batch
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.protocol.messages import Cancel, Submit
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.step.shape import StepShape
from eval.tasks import LONG_TASKS, draw_long
from gateway.prompts.chat import find_chat_template
from gateway.prompts.tokenizer import load_tokenizer
from gateway.prompts.turns import ChatMessage
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.compilations import watch_compilations
from tests.support.engines import Others, Transcript, assert_at_rest, submit_of
from tests.support.oracle_model import our_logits

SHIPPED_MODEL, INDEXED_MODEL = (Path(__file__).parents[2] / "models" / name for name in ("tiny-r1", "tiny-v32"))
LENGTHS = (1, 2, 63, 64, 65, 95, 129, 192, 193, 300)
PLAIN = {"decode_graphs": "off", "overlap": "off"}
FAST: dict[str, Any] = {}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def make_backend(checkpoint: Path, **settings: Any) -> tuple[EngineConfig, ModelBackend]:
    # In float32 rounding decides nothing: steps of other shapes draw the same tokens.
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "max_step_tokens": 96,
        "max_requests": 16,
        "total_blocks": 64,
    }
    config = EngineConfig(model_dir=checkpoint, **{**defaults, **settings})
    devices = torch.cuda.device_count()
    return config, ModelBackend(resolve(config, Hardware(devices, 1 << 30)))


def engine_over(checkpoint: Path, **settings: Any) -> Engine:
    return Engine(*make_backend(checkpoint, **settings), time.monotonic)


def submits(tokens: int = 40, **settings: Any) -> list[Submit]:
    return [
        submit_of(key, random_prompt(length, seed=length), tokens, **{"ignore_eos": True, **settings})
        for key, length in enumerate(LENGTHS)
    ]


def run(engine: Engine, requests: list[Submit]) -> dict[int, list[int]]:
    for request in requests:
        engine.submit(request)
    tokens = Transcript().run_with_reads(engine).token_ids
    assert_at_rest(engine)
    return tokens


@pytest.mark.gpu
def test_greedy_tokens_are_those_of_the_cpu(checkpoint: Path) -> None:
    expected = run(engine_over(checkpoint, device="cpu"), submits())
    assert run(engine_over(checkpoint), submits()) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [FAST, {"overlap": "off"}, {"decode_graphs": "off"}])
def test_graphs_and_overlap_change_no_token(checkpoint: Path, settings: dict[str, str]) -> None:
    assert run(engine_over(checkpoint, **settings), submits()) == run(engine_over(checkpoint, **PLAIN), submits())


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [FAST, {"overlap": "off"}, {"decode_graphs": "off"}])
def test_dummies_and_the_shapes_of_other_ranks_change_no_token(checkpoint: Path, settings: dict[str, str]) -> None:
    requests = submits()
    expected = run(engine_over(checkpoint, **PLAIN), requests)
    config, backend = make_backend(checkpoint, **settings)
    engine = Engine(config, backend, time.monotonic, agreement=Others([3, 40, 1, 90] * 100))
    transcript = Transcript()
    for request in requests:
        for _ in range(3):
            transcript.record(engine.step())
        engine.submit(request)
    assert transcript.run(engine).token_ids == expected
    assert_at_rest(engine)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [StepShape(1, rows=1), StepShape(16, rows=16), StepShape(90, rows=90), StepShape(90, decode_only=False)]
)
def test_a_dummy_step_writes_to_no_block_of_a_request(checkpoint: Path, shape: StepShape) -> None:
    _, backend = make_backend(checkpoint)
    with torch.inference_mode():
        backend.state.kv_pool.fill_(0.5)
    assert execute(backend, Batch(0, ()), shape) == []
    written = (backend.state.kv_pool != 0.5).flatten(2).any(dim=2).any(dim=0)
    assert written.nonzero().flatten().tolist() == [backend.state.padding_block]


@pytest.mark.gpu
def test_preemption_changes_no_token(checkpoint: Path) -> None:
    # All requests grow by three blocks, and the pool cannot hold them together.
    growing = submits(180)
    assert run(engine_over(checkpoint, total_blocks=24), growing) == run(engine_over(checkpoint, **PLAIN), growing)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_the_shipped_model_answers_alike_on_gpu_and_cpu(kv_dtype: str) -> None:
    # In bf16 and FP8, by the kernels made for DeepSeek's widths, with graphs and overlap.
    question = Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json")).encode("What is 358 + 467?").ids
    assert_mostly_as_on_a_cpu(SHIPPED_MODEL, [question * copies for copies in (1, 2, 5, 9)], 60, kv_dtype=kv_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_dtype", "next_n"), [("auto", 0), ("auto", 1), ("float8_e4m3fn", 2)])
def test_shipped_indexers_choose_alike_on_gpu_and_cpu(kv_dtype: str, next_n: int) -> None:
    settings = {"kv_dtype": kv_dtype, "drafts": DraftsConfig(next_n=next_n), "max_step_tokens": 300}
    assert_mostly_as_on_a_cpu(INDEXED_MODEL, needles(), 40, **settings)


@pytest.mark.gpu
def test_prompts_over_rounded_latents_answer_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise so short prompts attend with masks.
    monkeypatch.setattr("engine.model.state.masked_until", lambda *_: 0)
    settings = {"prompt_attention_dtype": "float8_e4m3fn", "max_step_tokens": 300}
    assert_mostly_as_on_a_cpu(INDEXED_MODEL, needles(), 40, **settings)


def needles() -> list[list[int]]:
    """Prompts of some 1,000 tokens, of which tiny-v32 chooses 512, and one that is shorter."""
    chat = find_chat_template(INDEXED_MODEL, load_tokenizer(INDEXED_MODEL))
    assert chat is not None
    texts = [draw_long(LONG_TASKS["needle"], Random(0), length, held_out=True).prompt for length in (900, 4200, 4500)]
    prompts = [chat.render([ChatMessage("user", text)]).token_ids for text in texts]
    assert len(prompts[0]) < 512 < 1000 < len(prompts[1])
    return prompts


def assert_mostly_as_on_a_cpu(model: Path, prompts: Sequence[Sequence[int]], tokens: int, **settings: Any) -> None:
    requests = [submit_of(key, prompt, tokens, ignore_eos=True) for key, prompt in enumerate(prompts)]
    found = run(engine_over(model, dtype="auto", **settings), requests)
    agreed = 0
    for key, prompt in enumerate(prompts):
        every = [*prompt, *found[key]]
        logits = our_logits(model, every, range(-(-len(every) // 64)), [len(every)])
        agreed += int((logits[len(prompt) - 1 : -1].argmax(1) == torch.tensor(found[key])).sum())
    # Few choices of these models are so close that rounding changes them.
    assert agreed > 0.95 * sum(map(len, found.values()))


@pytest.mark.gpu
def test_drawn_tokens_are_those_of_the_cpu(checkpoint: Path) -> None:
    requests = submits(sampling=Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=11))
    expected = run(engine_over(checkpoint, device="cpu"), requests)
    assert run(engine_over(checkpoint), requests) == expected


@pytest.mark.gpu
def test_log_probabilities_are_those_of_the_cpu(checkpoint: Path) -> None:
    requests = submits(5, sampling=Sampling(top_logprobs=3))
    transcripts = []
    for device in ("cpu", "cuda"):
        engine = engine_over(checkpoint, device=device)
        for request in requests:
            engine.submit(request)
        transcripts.append(Transcript().run(engine))
    for key in range(len(requests)):
        expected, found = (transcript.logprobs[key] for transcript in transcripts)
        for one, other in zip(expected, found, strict=True):
            assert one.top_token_ids == other.top_token_ids
            assert other.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("position", range(1, 8))
def test_an_end_of_sequence_ends_one_request_alone(checkpoint: Path, position: int) -> None:
    expected = run(engine_over(checkpoint, **PLAIN), submits(8))
    stop = expected[3][position - 1]
    ending = submits(8)
    ending[3] = submits(8, stop_token_ids=[stop])[3]
    found = run(engine_over(checkpoint), ending)
    ended = expected[3][: expected[3].index(stop) + 1]
    assert found == expected | {3: ended}


@pytest.mark.gpu
@pytest.mark.parametrize("step", range(1, 8))
def test_a_cancelled_request_disturbs_no_other(checkpoint: Path, step: int) -> None:
    expected = run(engine_over(checkpoint, **PLAIN), submits(20))
    engine, transcript = engine_over(checkpoint), Transcript()
    for request in submits(20):
        engine.submit(request)
    for _ in range(step):
        transcript.record(engine.step())
    engine.cancel(Cancel(2))
    found = transcript.run(engine).token_ids
    assert_at_rest(engine)
    assert {key: tokens for key, tokens in found.items() if key != 2} == {
        key: tokens for key, tokens in expected.items() if key != 2
    }


@pytest.mark.gpu
def test_steps_leave_nothing_allocated(checkpoint: Path) -> None:
    engine = engine_over(checkpoint)
    run(engine, submits())
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(5):
        run(engine, submits())
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_nothing_is_compiled_once_an_engine_serves(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = watch_compilations(monkeypatch)
    settings = {"dtype": "auto", "kv_dtype": kv_dtype, "max_step_tokens": 1024, "total_blocks": 512}
    engine = engine_over(SHIPPED_MODEL, **settings)
    assert compiled
    compiled.clear()
    for requests in whatever_comes():
        run(engine, requests)
        assert compiled == []


def whatever_comes() -> Iterator[list[Submit]]:
    """Requests of any kind: prompts of any length, alone and together, new and after known prefixes, with tokens drawn
    in any way."""
    chance = random.Random(5)
    ways = (Sampling(), Sampling(temperature=0.7, top_p=0.9, seed=3), Sampling(top_logprobs=4), Sampling(0.9, top_k=7))
    known = random_prompt(5000)
    keys = iter(range(1 << 20))

    def one(prompt: list[int]) -> Submit:
        return submit_of(next(keys), prompt, chance.randint(1, 5), sampling=chance.choice(ways), ignore_eos=True)

    for length in (1, 2, 15, 17, 97, 128, 129, 1023, 1025, 4096, 5000, *chance.sample(range(3, 3000), 20)):
        yield [one(random_prompt(length, seed=length))]
    yield [one(known)]
    for tail in (1, 2, 3, 40, 129, 170, 171, 300, *chance.sample(range(4, 900), 10)):
        yield [one(known[: 64 * chance.randint(1, 70)] + random_prompt(tail, seed=-tail))]
    for count in (2, 3, 7, 16, 30):
        yield [one(random_prompt(chance.randint(1, 500), seed=chance.randint(0, 9999))) for _ in range(count)]

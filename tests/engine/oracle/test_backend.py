from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backend import execute
from engine.batch import Batch, Row
from engine.oracle.backend import OracleBackend
from engine.oracle.tokens import oracle_tokens
from mesh.domain.outputs import Logprobs
from mesh.domain.sampling import Sampling
from mesh.errors import ConfigError
from tests.support.engines import VOCABULARY, oracle_config, prompt_of

GREEDY = Sampling()


def backend_of(**settings: object) -> OracleBackend:
    return OracleBackend(oracle_config(total_blocks=32, **settings))


def continue_with(
    backend: OracleBackend,
    prompt: list[int],
    blocks: list[int],
    count: int,
    sampling: Sampling = GREEDY,
    start: int = 0,
) -> list[int]:
    """Compute the prompt from `start` on in one row, then decode, one request alone."""
    tokens = list(prompt)
    for step in range(count):
        (sample,) = execute(backend, Batch(step, [Row(tokens[start:], start, blocks, sampling)]))
        assert sample is not None
        start = len(tokens)
        tokens.append(sample.token_ids[0])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_the_backend_draws_what_the_definition_says(length: int) -> None:
    prompt = prompt_of(length)
    assert continue_with(backend_of(), prompt, [9, 4, 17, 3, 8, 1, 2], 100) == oracle_tokens(prompt, 100, VOCABULARY)


@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=200),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    block_ids=st.permutations(range(8)),
)
def test_the_tokens_do_not_depend_on_chunks_or_blocks(prompt: list[int], cuts: list[int], block_ids: list[int]) -> None:
    backend = backend_of()
    bounds = [0, *sorted({cut for cut in cuts if cut < len(prompt)})]
    for start, end in pairwise(bounds):
        assert execute(backend, Batch(0, [Row(prompt[start:end], start, block_ids, None)])) == [None]
    assert continue_with(backend, prompt, block_ids, 3, start=bounds[-1]) == oracle_tokens(prompt, 3, VOCABULARY)


def test_rows_of_a_batch_do_not_disturb_one_another() -> None:
    backend = backend_of()
    prompts = [prompt_of(length, seed=length) for length in (1, 70, 130)]
    tables = [[0, 1], [2, 3], [4, 5, 6]]
    rows = [Row(prompt, 0, table, GREEDY) for prompt, table in zip(prompts, tables, strict=True)]
    samples = execute(backend, Batch(0, rows))
    assert [sample.token_ids for sample in samples if sample] == [
        oracle_tokens(prompt, 1, VOCABULARY) for prompt in prompts
    ]


def test_a_seed_decides_sampled_tokens_and_not_greedy_ones() -> None:
    prompt = prompt_of(100)
    one, two = (oracle_tokens(prompt, 50, VOCABULARY, Sampling(temperature=1.0, seed=seed)) for seed in (1, 2**64 - 1))
    greedy = oracle_tokens(prompt, 50, VOCABULARY)
    assert one != two != greedy
    assert oracle_tokens(prompt, 50, VOCABULARY, Sampling(seed=1)) == greedy
    assert continue_with(backend_of(), prompt, [3, 1, 2], 50, Sampling(temperature=0.5, seed=1)) == one


def damaged_continuations(damage: object, count: int) -> tuple[list[int], list[int]]:
    """The tokens after a prompt of four blocks whose KV was damaged, and the right ones."""
    backend, prompt, blocks = backend_of(), prompt_of(256), [5, 6, 7, 8, 9, 10]
    execute(backend, Batch(0, [Row(prompt[:255], 0, blocks, None)]))
    assert callable(damage)
    damage(backend.cells.reshape(-1, 64))
    return continue_with(backend, prompt, blocks, count, start=255), oracle_tokens(prompt, count, VOCABULARY)


def lose(cells: np.ndarray) -> None:
    cells[6] = 0


def swap(cells: np.ndarray) -> None:
    cells[[6, 7]] = cells[[7, 6]]


def duplicate(cells: np.ndarray) -> None:
    cells[7] = cells[6]


@pytest.mark.parametrize("damage", [lose, swap, duplicate])
def test_lost_swapped_and_duplicated_blocks_give_other_tokens(damage: object) -> None:
    got, expected = damaged_continuations(damage, 4)
    assert got != expected


@pytest.mark.parametrize("cell", [0, 1, 40, 63])
def test_one_wrong_cell_gives_other_tokens_within_a_block(cell: int) -> None:
    def corrupt(cells: np.ndarray) -> None:
        cells[7, cell] += np.uint64(1)

    got, expected = damaged_continuations(corrupt, 65)
    assert got != expected


def test_stale_kv_of_an_earlier_request_gives_other_tokens() -> None:
    backend, blocks = backend_of(), [0, 1, 2]
    continue_with(backend, prompt_of(128, seed=1), blocks, 1)
    prompt = prompt_of(129, seed=2)
    assert continue_with(backend, prompt, blocks, 3, start=128) != oracle_tokens(prompt, 3, VOCABULARY)


def test_tokens_use_the_vocabulary() -> None:
    tokens = oracle_tokens(prompt_of(10), 3000, 100)
    assert set(tokens) == set(range(100))


def test_logprobs_are_a_distribution_led_by_the_token_drawn() -> None:
    row = Row(prompt_of(5), 0, [0], Sampling(top_logprobs=3))
    (sample,) = execute(backend_of(), Batch(0, [row]))
    assert sample is not None
    assert sample.logprobs is not None and isinstance(sample.logprobs[0], Logprobs)
    assert sample.logprobs[0].top_token_ids[0] == sample.token_ids[0]
    assert sample.logprobs[0].logprob == sample.logprobs[0].top_logprobs[0]
    assert len(set(sample.logprobs[0].top_token_ids)) == 3
    assert np.exp(sample.logprobs[0].top_logprobs).sum() < 1


def paced_backend() -> tuple[OracleBackend, list[float]]:
    slept: list[float] = []
    config = oracle_config(total_blocks=32, oracle={"step_ms": 20.0, "prefill_tokens_per_second": 1000.0})
    return OracleBackend(config, clock=lambda: 0.0, sleep=slept.append), slept


def test_a_decode_step_takes_its_time_whatever_its_rows() -> None:
    backend, slept = paced_backend()
    execute(backend, Batch(0, [Row([1], 0, [0], GREEDY), Row([2], 0, [1], GREEDY)]))
    assert slept == [pytest.approx(0.020)]


def test_prompts_take_time_by_their_tokens() -> None:
    backend, slept = paced_backend()
    execute(backend, Batch(0, [Row([1], 0, [0], GREEDY), Row(prompt_of(100), 0, [1, 2], GREEDY)]))
    assert slept == [pytest.approx(0.120)]


def test_without_a_pace_nothing_sleeps() -> None:
    slept: list[float] = []
    backend = OracleBackend(oracle_config(total_blocks=32), clock=lambda: 0.0, sleep=slept.append)
    execute(backend, Batch(0, [Row([1], 0, [0], GREEDY)]))
    assert slept == []


def test_settings_of_the_configuration_are_declared() -> None:
    backend = backend_of(context_tokens=100, model_name="served-as")
    assert (backend.model, backend.context_tokens, backend.total_blocks) == ("served-as", 100, 32)
    assert backend.namespace != backend_of(oracle={"vocabulary_size": 7}).namespace


def test_a_pool_beyond_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.total_blocks=100000000000 takes 51,200\.0 GB"):
        OracleBackend(oracle_config(total_blocks=100_000_000_000))

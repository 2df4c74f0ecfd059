"""The model against transformers in float32: the same logits, and the same greedy tokens whatever the batching."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3ForCausalLM

from engine.batch import Row, Sample
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import (
    GREEDY,
    execute,
    generate,
    model_backend,
    prompt_row,
    random_prompt,
    tiny_checkpoint,
)
from tests.support.oracle_model import (
    assert_greedy,
    load_oracle,
    oracle_logits,
    our_logits,
    relative_error,
    write_dequantized,
)

# Out of order and apart, so that a request's latents are scattered over the pool.
BLOCKS = [5, 6, 2, 9, 1]
YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}


def random_overrides(seed: int) -> dict[str, Any]:
    choose = random.Random(seed).choice
    groups = choose([1, 2, 4])
    return {
        "q_lora_rank": choose([None, 48, 64]),
        "num_attention_heads": choose([1, 3, 4]),
        "kv_lora_rank": choose([32, 64, 96]),
        "qk_nope_head_dim": choose([16, 32]),
        "qk_rope_head_dim": choose([8, 16]),
        "v_head_dim": choose([16, 24, 32]),
        "num_hidden_layers": choose([2, 3]),
        "first_k_dense_replace": choose([0, 1, 2]),
        "n_routed_experts": choose([8, 16]),
        "n_shared_experts": choose([1, 2]),
        "num_experts_per_tok": choose([1, 2]),
        "n_group": groups,
        "topk_group": choose(range(1, groups + 1)),
        "norm_topk_prob": choose([True, False]),
        "routed_scaling_factor": choose([1.0, 2.5]),
        "num_nextn_predict_layers": choose([0, 1, 2]),
        "rope_scaling": choose(
            [
                None,
                YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
                YARN | {"factor": 4, "mscale": 0.7, "mscale_all_dim": 1.3},
            ]
        ),
    }


# The published widths per head, and extreme cases that random draws may miss.
NAMED = {
    "published head": {
        "num_attention_heads": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
    },
    "all layers dense": {"first_k_dense_replace": 3},
    "no dense layer": {"first_k_dense_replace": 0},
    "yarn with unequal magnitudes": {
        "rope_scaling": YARN | {"factor": 40, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "yarn with every key": {
        "rope_scaling": YARN | {"factor": 8, "mscale_all_dim": 1.0, "truncate": False, "attention_factor": 1.7},
    },
}
CONFIGURATIONS = [pytest.param(value, id=name) for name, value in NAMED.items()] + [
    pytest.param(random_overrides(seed), id=f"random {seed}") for seed in range(5)
]


def token_of(sample: Sample | None) -> int:
    assert sample is not None
    (token_id,) = sample.token_ids
    return token_id


@pytest.mark.parametrize("overrides", CONFIGURATIONS)
def test_teacher_forced_logits_equal_the_oracles(tmp_path: Path, overrides: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, **overrides)
    tokens = random_prompt(150)
    expected = oracle_logits(load_oracle(tmp_path), tokens)
    # A whole prompt, single tokens, and a long and a short chunk after a cached prefix.
    for chunks in ([150], [64, 1, 1, 84], [70, 79, 1], [120, 30]):
        assert relative_error(our_logits(tmp_path, tokens, BLOCKS, chunks), expected) < 1e-5


@pytest.mark.parametrize("overrides", [NAMED["published head"], {"q_lora_rank": None}, {"n_shared_experts": 2}])
def test_fp8_checkpoints_equal_the_dequantized_oracle(tmp_path: Path, overrides: dict[str, Any]) -> None:
    source = tiny_checkpoint(tmp_path / "fp8", dtype="float8", **overrides)
    oracle = load_oracle(write_dequantized(source, tmp_path / "dequantized"))
    tokens = random_prompt(100)
    assert relative_error(our_logits(source, tokens, BLOCKS, [99, 1]), oracle_logits(oracle, tokens)) < 1e-5


def test_bfloat16_checkpoints_equal_the_oracle(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, dtype="bfloat16")
    tokens = random_prompt(100)
    expected = oracle_logits(load_oracle(tmp_path), tokens)
    assert relative_error(our_logits(tmp_path, tokens, BLOCKS, [100]), expected) < 1e-5


def test_a_checkpoint_that_transformers_saved_gives_the_same_logits(tmp_path: Path) -> None:
    oracle = load_oracle(tiny_checkpoint(tmp_path / "ours"))
    oracle.save_pretrained(tmp_path / "theirs")
    tokens = random_prompt(100)
    found = our_logits(tmp_path / "theirs", tokens, BLOCKS, [100])
    assert relative_error(found, oracle_logits(oracle, tokens)) < 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return load_oracle(checkpoint)


@pytest.mark.parametrize(
    ("chunk", "length"),
    [
        (1, 65),
        (50, 2),
        (50, 64),
        (50, 127),
        (50, 200),
        (64, 63),
        (64, 65),
        (64, 128),
        (64, 200),
        (1000, 64),
        (1000, 200),
    ],
)
def test_prompts_across_block_and_chunk_boundaries(
    checkpoint: Path, oracle: DeepseekV3ForCausalLM, length: int, chunk: int
) -> None:
    prompt = random_prompt(length, seed=length)
    assert_greedy(oracle, prompt, generate(model_backend(checkpoint), prompt, 5, BLOCKS, chunk=chunk))


def test_a_prompt_of_one_token(checkpoint: Path, oracle: DeepseekV3ForCausalLM) -> None:
    prompt = random_prompt(1)
    assert_greedy(oracle, prompt, generate(model_backend(checkpoint), prompt, 70, BLOCKS))


def test_a_cached_prefix_of_another_request_serves_as_ones_own(checkpoint: Path, oracle: DeepseekV3ForCausalLM) -> None:
    backend = model_backend(checkpoint)
    shared = random_prompt(128)
    generate(backend, shared + random_prompt(30, seed=1), 5, [5, 6, 2])
    prompt = shared + random_prompt(50, seed=2)
    (sample,) = execute(backend, prompt_row(prompt, 128, len(prompt), [5, 6, 11]))
    assert sample is not None
    assert_greedy(oracle, prompt, [sample.token_ids[0]])


def test_each_row_of_a_mixed_step_draws_its_own_token(checkpoint: Path, oracle: DeepseekV3ForCausalLM) -> None:
    lengths = [64, 1, 130, 31, 65]
    prompts = [random_prompt(length, seed=length) for length in lengths]
    blocks = [[10 * index + 2, 10 * index + 1, 10 * index + 4] for index in range(len(prompts))]
    backend = model_backend(checkpoint)
    # The first two prompts are computed; they decode while the others arrive, the third with a cached half.
    first = [execute(backend, prompt_row(prompts[index], 0, lengths[index], blocks[index]))[0] for index in (0, 1)]
    assert execute(backend, prompt_row(prompts[2], 0, 70, blocks[2], last=False)) == [None]
    rows = [
        Row([sample.token_ids[0]], lengths[index], blocks[index][: lengths[index] // 64 + 1], GREEDY)
        for index, sample in enumerate(first)
        if sample is not None
    ]
    rows.append(prompt_row(prompts[2], 70, 130, blocks[2]))
    rows.append(prompt_row(prompts[3], 0, 20, blocks[3], last=False))
    rows.append(prompt_row(prompts[4], 0, 65, blocks[4]))
    samples = execute(backend, *rows)
    assert [sample is None for sample in samples] == [False, False, False, True, False]
    for index in (0, 1):
        assert_greedy(oracle, prompts[index], [token_of(first[index]), token_of(samples[index])])
    for index in (2, 4):
        assert_greedy(oracle, prompts[index], [token_of(samples[index])])


def test_many_requests_in_one_batch_decode_as_they_do_alone(checkpoint: Path, oracle: DeepseekV3ForCausalLM) -> None:
    backend = model_backend(checkpoint, total_blocks=128)
    requests = [random_prompt(10 + 17 * index, seed=index) for index in range(8)]
    blocks = [list(range(10 * index, 10 * index + 10)) for index in range(8)]
    tokens = [list(prompt) for prompt in requests]
    starts = [0] * len(tokens)
    for _ in range(12):
        rows = [prompt_row(*row) for row in zip(tokens, starts, map(len, tokens), blocks, strict=True)]
        starts = [len(row) for row in tokens]
        for row, sample in zip(tokens, execute(backend, *rows), strict=True):
            assert sample is not None
            row.append(sample.token_ids[0])
    for prompt, row in zip(requests, tokens, strict=True):
        assert_greedy(oracle, prompt, row[len(prompt) :])


def test_logprobs_are_the_oracles(checkpoint: Path, oracle: DeepseekV3ForCausalLM) -> None:
    prompt = random_prompt(40)
    row = Row(prompt, 0, [3], Sampling(top_logprobs=4))
    (sample,) = execute(model_backend(checkpoint), row)
    expected = oracle_logits(oracle, prompt)[-1].log_softmax(0).topk(4)
    assert sample is not None and sample.logprobs is not None
    assert sample.logprobs[0].top_token_ids == expected.indices.tolist()
    assert sample.logprobs[0].top_logprobs == pytest.approx(expected.values.tolist(), abs=1e-4)
    assert sample.logprobs[0].logprob == sample.logprobs[0].top_logprobs[0]

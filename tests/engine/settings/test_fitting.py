"""A drawn configuration fits its card, or is refused in a sentence with values that do."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.memory.rank_memory import RankMemory, reckon
from engine.model.config import ModelConfig
from engine.settings.card import Card
from engine.settings.choice import with_value
from engine.settings.device import kept_weights
from engine.settings.fitting import check_fits, fewest_ranks
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError
from tests.support.situations import card_of, engine_of, model_of, resolved
from transfer.config import TransferConfig

SIZES = {"r1": ("fp8", "w4a8", "nvfp4"), "moonlight": ("bf16", "fp8"), "glm-flash": ("bf16",)}


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    name = draw(st.sampled_from([*SIZES]))
    layers = draw(st.integers(4, 61))
    return model_of(name, draw(st.sampled_from(SIZES[name])), num_hidden_layers=layers)


@st.composite
def engines(draw: st.DrawFn) -> EngineConfig:
    settings: dict[str, Any] = {
        "max_requests": draw(st.integers(1, 500)),
        "max_step_tokens": draw(st.integers(4096, 65536)),
        "kv_dtype": draw(st.sampled_from(["auto", "float8_e4m3fn"])),
        "prompt_attention_dtype": draw(st.sampled_from(["auto", "float8_e4m3fn"])),
        "drafts": {"next_n": draw(st.sampled_from([0, 1, 3, "auto"]))},
        "balance": {"redundant": draw(st.integers(0, 8))},
        "transfer": draw(st.sampled_from([None, {"slots": 8, "slot_bytes": 64 << 20}, {"slots": 64}])),
        "total_blocks": draw(st.none() | st.integers(2, 20000)),
    }
    dp = draw(st.sampled_from([1, 2, 4, 8]))
    return engine_of(parallel={"dp": dp, "ep": dp}, **settings)


def reckoned(model: ModelConfig, card: Card, engine: EngineConfig) -> RankMemory:
    return reckon(model, card, engine, kept_weights(engine, "cuda"))


def lowered(engine: EngineConfig, message: str) -> EngineConfig | None:
    """The configuration as the refusal says; None if it says something else."""
    found = re.findall(r"engine\.([\w.]+) to (?:at most )?(\d+)", message)
    for key, value in found:
        engine = with_value(engine, key, int(value))
    return engine if found else None


@given(model=models(), engine=engines(), gigabytes=st.floats(8, 200))
def test_a_drawn_configuration_fits_or_is_told_what_does(
    model: ModelConfig, engine: EngineConfig, gigabytes: float
) -> None:
    card = Card("card", int(gigabytes * 1e9), (9, 0))
    try:
        found = check_fits(model, card, engine)
    except ConfigError as refused:
        assert "\n" not in refused.message
        less = lowered(engine, refused.message)
        if less is None:
            assert re.search(r"takes [\d.]+ GB on .* has too little: (take|quantize)", refused.message)
            return
        found = check_fits(model, card, less)
        # The last of the keys has the largest value that fits.
        key, value = re.findall(r"engine\.([\w.]+) to at most (\d+)$", refused.message)[0]
        with pytest.raises(ConfigError):
            check_fits(model, card, with_value(less, key, int(value) + 1))
    assert found.blocks >= 2
    assert found.taken + (found.blocks + found.foreign_blocks) * found.block <= found.there


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_requests", 192),
        ("max_step_tokens", 16384),
        ("balance.redundant", 2),
        ("drafts.next_n", "auto"),
        ("prompt_attention_dtype", "float8_e4m3fn"),
        ("transfer", TransferConfig(slots=16, slot_bytes=64 << 20)),
    ],
)
def test_all_that_lives_later_is_counted(key: str, value: Any) -> None:
    model, card, engine = model_of(), card_of(), engine_of(parallel={"dp": 4, "ep": 4})
    changed = EngineConfig.model_validate(with_value(engine, key, value).model_dump())
    assert reckoned(model, card, changed).taken > reckoned(model, card, engine).taken


@pytest.mark.parametrize(
    ("experts", "card", "ranks"),
    [("w4a8", "h200", 4), ("fp8", "h200", 8), ("w4a8", "h100", 8), ("fp8", "h100", None), ("w4a8", "b200", 4)],
)
def test_a_model_takes_the_fewest_gpus_that_hold_it(experts: str, card: str, ranks: int | None) -> None:
    model = model_of(experts=experts)
    assert fewest_ranks(engine_of(1), WorkerRole.DECODE, model, card_of(card), drafts=True, most=8) == ranks


@pytest.mark.parametrize("layers", [22, "auto"])
def test_experts_in_host_memory_take_none_of_the_gpus(layers: int | str) -> None:
    """R1's INT4 experts on two H200, as docs/sizing.md has it."""
    engine = engine_of(parallel={"dp": 2, "ep": 2}, offload={"layers": layers}, context_tokens=32768)
    assert check_fits(model_of(), card_of(), engine).weights < 140e9
    with pytest.raises(ConfigError):
        check_fits(model_of(), card_of(), with_value(engine, "offload.layers", 0))


@pytest.mark.parametrize(
    ("ranks", "card", "told"),
    [
        (
            1,
            "h200",
            r"takes 358\.\d GB on one GPU, and one h200 with 149\.2 GB .*: take 4 GPUs \(--gpus 4, or",
        ),
        (2, "h200", r"on each of 2 GPUs, .*take 4 GPUs"),
        (8, "l40s", r"take cards with more memory, or a checkpoint with smaller experts"),
    ],
)
def test_a_model_too_large_names_the_flag_or_format(ranks: int, card: str, told: str) -> None:
    # INT4 is for Hopper.
    model = model_of() if card == "h200" else model_of("r1", "fp8")
    with pytest.raises(ConfigError, match=told):
        check_fits(model, card_of(card), resolved(engine_of(ranks), card=card).engine)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (1, r"take 8 GPUs .*, or quantize its experts to INT4 \(deepmesh quantize --format w4a8\) and take 4 GPUs$"),
        (4, r"take 8 GPUs .*, or quantize its experts to INT4 \(deepmesh quantize --format w4a8\)$"),
    ],
)
def test_fp8_experts_too_large_may_become_int4(ranks: int, told: str) -> None:
    model = model_of("r1", "fp8")
    with pytest.raises(ConfigError, match=told):
        check_fits(model, card_of(), resolved(engine_of(ranks), model=model).engine)


def test_plain_weights_too_large_may_be_quantized_at_load() -> None:
    model = model_of("glm-flash", "bf16")
    with pytest.raises(ConfigError, match=r"take 2 GPUs .*, or quantize it while it loads \(engine\.weights=fp8\)"):
        check_fits(model, card_of("l40s"), resolved(engine_of(1), model=model, card="l40s").engine)


@pytest.mark.parametrize(
    ("model", "card", "told"),
    [
        (model_of("r1", "fp8"), "a100", r"a100 has no products in FP8 .* 8\.0, .*: serve a checkpoint in bf16"),
        (model_of("r1", "w4a8"), "a100", "no products in FP8"),
        (model_of("r1", "w4a8"), "b200", r"no kernels for INT4 experts \(.*\): serve a checkpoint in FP8 or bf16$"),
    ],
    ids=["FP8 on an A100", "INT4 on an A100", "INT4 on a B200"],
)
def test_what_a_card_does_not_multiply_is_refused(model: ModelConfig, card: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_fits(model, card_of(card), engine_of(8))


def test_a_start_that_ended_out_of_memory_fits_now() -> None:
    """R1 with INT4 experts on four H200, as it was started when the plan did not count drafts and FP8 prompts."""
    engine = engine_of(
        parallel={"dp": 4, "ep": 4},
        max_requests=192,
        max_step_tokens=4096,
        drafts={"next_n": "auto"},
        balance={"redundant": 2},
        kv_dtype="float8_e4m3fn",
        prompt_attention_dtype="float8_e4m3fn",
    )
    found = check_fits(model_of(), card_of(), engine)
    assert found.graphs > 3e9 and found.taken + found.blocks * found.block < found.there

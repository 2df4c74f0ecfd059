from dataclasses import replace

import pytest

from capacity.ceilings import Ceilings
from capacity.floor import decode_floor, decode_operations, guess_operations
from capacity.shapes import EXPERTS, SHAPES
from engine.model.config import ModelConfig, parse_model_config

CEILINGS = Ceilings(bytes_per_second=4.28e12, bf16_flops=783e12, fp8_flops=1483e12)


def rank(experts: str = "fp8") -> ModelConfig:
    return parse_model_config({**SHAPES["r1-ep8-rank"], "quantization_config": EXPERTS[experts]})


@pytest.mark.parametrize(("requests", "milliseconds"), [(32, 25.8), (64, 28.2), (96, 30.6)])
def test_a_ranks_floor_is_of_its_bytes_and_flops(requests: int, milliseconds: float) -> None:
    operations = decode_operations(rank(), requests, context=3500, kv_item_bytes=2)
    assert decode_floor(operations, CEILINGS) * 1000 == pytest.approx(milliseconds, abs=0.06)


def test_one_request_reads_the_experts_that_it_chose() -> None:
    one, many = (
        {each.name: each.size_bytes for each in decode_operations(rank(), requests, context=3500, kv_item_bytes=2)}
        for requests in (1, 1000)
    )
    assert one["experts down"] == pytest.approx(many["experts down"] * 8 / 32)
    assert one["head"] == many["head"]


def test_one_byte_latents_halve_the_bytes_of_attention() -> None:
    wide, narrow = (
        next(
            each for each in decode_operations(rank(), 64, context=3500, kv_item_bytes=size) if each.name == "attention"
        )
        for size in (2, 1)
    )
    assert narrow.size_bytes * 2 == wide.size_bytes and narrow.fp8 and not wide.fp8


def test_int4_experts_take_about_half_of_the_bytes() -> None:
    wide, narrow = (decode_operations(rank(experts), 64, context=3500, kv_item_bytes=1) for experts in ("fp8", "w4a8"))
    assert decode_floor(narrow, CEILINGS) * 1000 == pytest.approx(16.6, abs=0.1)
    for before, after in zip(wide, narrow, strict=True):
        share = 0.515625 if before.name.startswith("experts") else 1
        assert after.size_bytes == pytest.approx(before.size_bytes * share)


def test_smaller_groups_have_more_scales() -> None:
    wide = rank("w4a8")
    narrow = replace(wide, quantization=replace(wide.quantization, group=32))
    before, after = (
        next(each for each in decode_operations(config, 64, 3500, kv_item_bytes=1) if each.name == "experts down")
        for config in (wide, narrow)
    )
    assert after.size_bytes / before.size_bytes == pytest.approx(0.5625 / 0.515625)


def test_nvfp4_layers_are_multiplied_in_bfloat16_beside_attention_of_bfloat16() -> None:
    wide, narrow = (
        {each.name: each for each in decode_operations(rank(experts), 64, context=3500, kv_item_bytes=1)}
        for experts in ("fp8", "nvfp4")
    )
    shares = {name: narrow[name].size_bytes / wide[name].size_bytes for name in wide}
    for name, share in shares.items():
        layer = name.split()[0]
        published = name in ("attention input", "attention queries", "attention output")
        expected = 0.5625 if layer in ("experts", "shared", "dense") else 2 if published else 1
        assert share == pytest.approx(expected)
        assert not narrow[name].fp8 or name == "attention"


def test_drafts_read_weights_once_and_guesses_their_layer() -> None:
    plain, drafted = (decode_operations(rank(), 8, 3500, kv_item_bytes=1, drafts=drafts) for drafts in (0, 3))
    for before, after in zip(plain, drafted, strict=True):
        assert after.flops == pytest.approx(4 * before.flops)
        # More rows touch more experts; all else is read once.
        assert (after.size_bytes > before.size_bytes) == (before.name in ("experts gate and up", "experts down"))
    guesses = list(guess_operations(rank(), 8, 3500, 1, drafts=3))
    merges = [each for each in guesses if each.name == "draft merge"]
    heads = [each for each in guesses if each.name == "draft head"]
    assert [each.flops / merges[-1].flops for each in merges] == [4, 1, 1]
    assert len({each.flops for each in heads}) == 1 and sum(each.name == "attention" for each in guesses) == 3


def indexed_steps(requests: int, context: int) -> tuple[float, dict[str, float]]:
    operations = decode_operations(parse_model_config(SHAPES["v32-ep8-rank"]), requests, context, kv_item_bytes=2)
    return decode_floor(operations, CEILINGS), {each.name: each.size_bytes for each in operations}


def test_attention_stops_growing_where_tokens_are_selected() -> None:
    (_, short), (near, at_32k), (far, at_128k) = (indexed_steps(64, context) for context in (2048, 32768, 131072))
    assert short["attention"] == at_32k["attention"] == at_128k["attention"] == 61 * 64 * 2048 * 1152
    assert "index scores" not in short and at_128k["index scores"] == 61 * 64 * 131072 * 132
    # R1 reads 61 * 1,152 bytes for each token in place of 61 * 132.
    dense = decode_floor(decode_operations(rank(), 64, 131072, kv_item_bytes=2), CEILINGS)
    assert near < far < dense / 3


def test_drafts_select_and_attend_apart() -> None:
    config = parse_model_config(SHAPES["v32-ep8-rank"])
    alone, drafted = (
        {each.name: each.size_bytes for each in decode_operations(config, 8, 32768, 2, drafts)} for drafts in (0, 2)
    )
    assert drafted["attention"] == 3 * alone["attention"] and drafted["index scores"] == alone["index scores"]

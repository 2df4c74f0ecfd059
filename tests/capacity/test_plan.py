from dataclasses import replace

import pytest

from capacity.cards import GPUS
from capacity.memory import weights_of
from capacity.plan import Asked, plan, shipped_costs
from capacity.shapes import DEEPSEEK_R1, DEEPSEEK_V32
from engine.model.config import parse_model_config
from engine.model.quantization import AT_LOAD, Quantization, Stored
from mesh.errors import ConfigError

R1 = parse_model_config(DEEPSEEK_R1)
EIGHT = Asked("h200", 8, 3500, 1000)
# bf16 FLOPs for each byte of memory that a card's datasheet promises in the same time.
PEAK_FLOPS_A_BYTE = {
    "h100": 989 / 3.35,
    "h20": 148 / 4.0,
    "h800": 989 / 3.35,
    "a100": 312 / 2.039,
    "l40s": 362 / 0.864,
    "rtx4090": 165.2 / 1.008,
    "rtx5090": 209.5 / 1.792,
    "b200": 2250 / 7.7,
}


def test_an_eighth_of_r1_takes_what_the_benchmark_takes() -> None:
    weights = weights_of(R1, 8)
    # bench.rank made 100 GB when kv_b_proj was kept in bf16 alone; in FP8 too it takes 1 GB more.
    assert weights.total == pytest.approx(101e9, rel=0.02)
    assert plan(R1, EIGHT).kv_token_bytes == 70_272


def test_the_measured_layout_is_predicted_to_take_what_was_measured() -> None:
    found = plan(R1, replace(EIGHT, prompt_tokens=3500, output_tokens=1))
    measured = shipped_costs("h200-r1-ep8-fp8.json").costs
    for requests in (1, 8, 32, 64, 96):
        assert found.costs.costs.decode_ms(requests) == pytest.approx(measured.decode_ms(requests), rel=1e-6)
    # bench.rank: 10,579 prompt tokens a second.
    assert 3500 / found.costs.costs.prefill_ms(3500) * 1000 == pytest.approx(10_579, rel=0.001)


def test_r1_in_fp8_needs_eight_cards() -> None:
    four, eight = plan(R1, replace(EIGHT, gpus=4)), plan(R1, EIGHT)
    assert not four.fits and four.requests == four.decode_per_minute == 0
    assert eight.fits and eight.kv_tokens > 300_000


def test_gpus_that_divide_experts_unevenly_hold_the_largest_share() -> None:
    uneven, even = plan(R1, replace(EIGHT, gpus=24)), plan(R1, replace(EIGHT, gpus=32))
    assert uneven.experts_bytes / even.experts_bytes == pytest.approx(11 / 8, rel=0.001)
    assert uneven.kv_tokens < even.kv_tokens


def test_a_gpu_with_few_experts_reads_them_all() -> None:
    steps = [plan(R1, replace(EIGHT, gpus=gpus)).costs.costs.decode_ms(64) for gpus in (32, 64, 128)]
    # With fewer experts a step is shorter, down to what is on every GPU.
    assert steps == sorted(steps, reverse=True) and steps[-1] > 0.7 * steps[0]


def test_fp8_kv_holds_twice_as_many_tokens() -> None:
    bf16, fp8 = plan(R1, EIGHT), plan(R1, replace(EIGHT, kv_item_bytes=1))
    room = 32768
    # Prompts of other ranks have room for as many tokens either way.
    assert fp8.kv_tokens + room == pytest.approx(2 * (bf16.kv_tokens + room), rel=0.01)


def test_an_objective_bounds_the_requests() -> None:
    free, bound = plan(R1, EIGHT), plan(R1, replace(EIGHT, tpot_ms=35.0))
    assert bound.requests < free.requests
    assert bound.tpot_ms <= 35.0 and bound.bound == "35 ms a token"


def test_rates_add_up() -> None:
    found = plan(R1, EIGHT)
    assert 1 / found.both_per_minute == pytest.approx(1 / found.decode_per_minute + 1 / found.prefill_per_minute)


def test_experts_in_host_memory_fit_r1_on_four_cards() -> None:
    lacking = plan(R1, replace(EIGHT, gpus=4))
    assert lacking.offload_needed is not None
    found = plan(R1, replace(EIGHT, gpus=4, offloaded=lacking.offload_needed))
    assert found.fits and found.host_bytes == pytest.approx(
        lacking.offload_needed * 256 / 4 * 3 * 7168 * 2048, rel=1e-3
    )
    assert not plan(R1, replace(EIGHT, gpus=4, offloaded=lacking.offload_needed - 1)).fits
    eight = plan(R1, EIGHT)
    assert found.prefill_per_minute == pytest.approx(eight.prefill_per_minute / 2, rel=1e-3)
    # A step that decodes waits for the copy.
    assert found.tpot_ms == pytest.approx(found.host_bytes / 55e9 * 1000)


def test_prompts_are_slower_if_copies_outlast_steps() -> None:
    whole, offloaded = plan(R1, EIGHT), plan(R1, replace(EIGHT, offloaded=58))
    copy = offloaded.host_bytes / 55e9
    assert offloaded.costs.costs.prefill_tokens_per_second == pytest.approx(16384 / copy)
    assert offloaded.prefill_per_minute < whole.prefill_per_minute / 1.1


def test_packed_weights_are_planned_as_quantized_again() -> None:
    packed, int4 = (replace(R1, quantization=each) for each in (Quantization(experts=Stored.PACKED), AT_LOAD["w4a8"]))
    assert plan(packed, EIGHT) == plan(int4, EIGHT)


@pytest.mark.parametrize("gpu", ["h100", "h20", "h800", "a100", "l40s", "rtx4090", "rtx5090", "b200"])
def test_a_card_by_datasheet_keeps_up_less_than_its_peaks(gpu: str) -> None:
    card = GPUS[gpu]
    assert not card.measured and "NVIDIA" in card.source
    # The measured card keeps up 0.88 of its datasheet's bytes and 0.70 of its FLOPs.
    assert card.ceilings.bf16_flops / card.ceilings.bytes_per_second == pytest.approx(
        PEAK_FLOPS_A_BYTE[gpu] * 0.70 / 0.883, rel=0.01
    )


@pytest.mark.parametrize(("gpu", "mib"), [("h100", 81_559), ("a100", 81_920), ("l40s", 46_068), ("b200", 183_359)])
def test_memory_is_nearly_all_that_the_driver_shows(gpu: str, mib: int) -> None:
    assert GPUS[gpu].memory_bytes == pytest.approx(0.99 * (mib << 20), rel=0.001)


def test_a_slower_card_takes_longer_for_prompts_and_tokens() -> None:
    few = replace(EIGHT, gpus=16, tpot_ms=None)
    measured, slower = plan(R1, few), plan(R1, replace(few, gpu="h20"))
    assert slower.prefill_per_minute == pytest.approx(measured.prefill_per_minute * 296 / 1979, rel=0.01)
    assert slower.costs.costs.decode_ms(8) > measured.costs.costs.decode_ms(8)
    assert not slower.gpu.measured and measured.gpu.measured


def test_a_card_may_be_named_in_capitals() -> None:
    assert plan(R1, replace(EIGHT, gpu="H20")) == plan(R1, replace(EIGHT, gpu="h20"))


def test_a_card_without_fp8_multiplies_in_bf16() -> None:
    ceilings = GPUS["a100"].ceilings
    assert ceilings.fp8_flops == ceilings.bf16_flops


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpu": "v100"}, "known are h200, h100, h20, h800, a100, l40s, rtx4090, rtx5090, b200"),
        ({"gpus": 257}, "expected one to 256, as many as the model has experts"),
        ({"gpus": 0}, "--gpus 0: "),
        ({"offloaded": 2}, "expected 3 to 58 layers"),
        ({"offloaded": 59}, "expected 3 to 58 layers"),
        ({"weights": "fp8"}, "only plain weights are quantized"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(change: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(R1, replace(EIGHT, **change))  # type: ignore[arg-type]


def test_a_model_with_indexers_is_planned_flat_in_context() -> None:
    v32 = parse_model_config(DEEPSEEK_V32)
    short, long = (plan(v32, replace(EIGHT, prompt_tokens=prompt)) for prompt in (3500, 120_000))
    dense = plan(R1, replace(EIGHT, prompt_tokens=120_000)).costs.costs
    costs = long.costs.costs
    assert short.kv_token_bytes == 61 * (1152 + 132) and costs.selected_tokens == 2048
    assert costs.decode_ms(8) < 1.1 * short.costs.costs.decode_ms(8) and costs.decode_ms(64) < dense.decode_ms(64) / 2
    # Selected latents take a prompt as long as some 7,000 expanded keys. Up to these it attends to all, as R1 does.
    assert costs.prompt_selected_tokens == 6963 and costs.prefill_pairs_ms == pytest.approx(dense.prefill_pairs_ms)
    assert costs.prefill_ms(120_000) < dense.prefill_ms(120_000) / 2

"""Every performance setting that is not given is chosen, by one rule each."""

from typing import Any

import pytest

from capacity.shapes import DEEPSEEK_V32
from engine.config import EngineConfig
from engine.model.config import ModelConfig, parse_model_config
from engine.settings.choice import value_of
from engine.settings.quality import SHOWN, Shown
from engine.settings.rules import RULES
from mesh.config_values import load
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError
from tests.support.situations import engine_of, model_of, reason, resolved

PREFILL = WorkerRole.PREFILL
SHOWN_ON_GPUS = {("kv_dtype", "float8_e4m3fn"): Shown("FP8, FP8 KV", "cuda", "FP8", within_chance=True)}


def test_r1_on_four_h200_gets_the_recipe_that_was_measured() -> None:
    found = resolved().engine
    assert (found.max_requests, found.max_step_tokens, found.drafts.next_n) == (96, 4096, "auto")
    assert (found.balance.redundant, found.parallel.dp, found.parallel.ep) == (2, 4, 4)
    assert found.kv_dtype == found.prompt_attention_dtype == found.weights == "auto"


def test_every_choice_has_a_reason_of_one_line() -> None:
    found = resolved(engine_of(transfer={}))
    assert len(found.choices) == 1 + len(RULES)
    assert all(each.reason and "\n" not in str(each) and len(str(each)) < 160 for each in found.choices)


@pytest.mark.parametrize("role", WorkerRole)
def test_a_cpu_keeps_the_defaults(role: WorkerRole) -> None:
    given = engine_of(1, transfer={})
    found = resolved(given, role, card=None)
    assert found.engine == given.model_copy(update={"parallel": found.engine.parallel})
    assert not found.choices
    assert resolved(engine_of(1, device="cpu")).engine.max_requests == EngineConfig(backend="oracle").max_requests


def test_hosts_that_never_ran_on_gpus_choose_a_layout_alone() -> None:
    found = resolved(engine_of(parallel={"ranks": 16, "hosts": 2}))
    assert [each.key for each in found.choices] == ["parallel"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_requests", 64),
        ("max_step_tokens", 2048),
        ("drafts.next_n", 0),
        ("balance.redundant", 0),
        ("parallel.prompt_wait_steps", 16),
        ("prompt_share", 0.33),
        ("kv_dtype", "float8_e4m3fn"),
        ("transfer.slot_bytes", 8 << 20),
    ],
)
def test_given_settings_win_even_if_they_are_defaults(key: str, value: object) -> None:
    settings = ["model_dir=R1", "parallel.ranks=4", "transfer={}", f"{key}={value}"]
    found = resolved(load(EngineConfig, overrides=settings))
    assert value_of(found.engine, key) == value
    assert reason(found, key) == "as given"


@pytest.mark.parametrize(("aim", "requests"), [("latency", 32), ("balanced", 96), ("throughput", 128)])
def test_the_aim_chooses_how_many_requests_run(aim: str, requests: int) -> None:
    assert resolved(engine_of(aim=aim)).engine.max_requests == requests


@pytest.mark.parametrize(("aim", "bound"), [("latency", "auto"), ("balanced", "auto"), ("throughput", None)])
def test_the_aim_chooses_whether_steps_are_even(aim: str, bound: str | None) -> None:
    assert resolved(engine_of(aim=aim)).engine.mixed_step_ms == bound


@pytest.mark.parametrize(
    ("shape", "why"),
    [("moonlight", "takes as long as R1's to 96"), ("glm-flash", "their step is shorter than R1's of 96")],
)
def test_a_light_model_runs_more_requests_and_tokens(shape: str, why: str) -> None:
    found = resolved(engine_of(1), model=model_of(shape, "bf16"), drafts=False)
    assert (found.engine.max_requests, found.engine.max_step_tokens) == (256, 8192)
    assert why in reason(found, "max_requests")


@pytest.mark.parametrize(
    ("shape", "drafts", "settings", "tokens"),
    [
        pytest.param("moonlight", False, {}, 4096, id="a light model"),
        pytest.param("moonlight", False, {"max_step_tokens": 2048}, 1536, id="no step is as large"),
        pytest.param("moonlight", False, {"parallel": {"ranks": 2}}, 1536, id="several ranks"),
        pytest.param("moonlight", False, {"experts": "fp8"}, 1536, id="another format"),
        pytest.param("moonlight", False, {"weights": "fp8"}, 1536, id="another format by choice"),
        pytest.param("glm-flash", True, {}, 1536, id="drafts"),
        pytest.param("r1-ep8-rank", False, {}, 1536, id="a heavy model"),
    ],
)
def test_a_light_models_large_steps_are_captured(
    shape: str, drafts: bool, settings: dict[str, Any], tokens: int
) -> None:
    given = {"parallel": {"ranks": 1}, **settings}
    model = model_of(shape, given.pop("experts", "bf16"))
    found = resolved(engine_of(**given), model=model, drafts=drafts)
    assert found.engine.prompt_graph_tokens == tokens
    assert ("(Moonlight, an H200)" in reason(found, "mixed_step_ms")) == (tokens == 4096)


@pytest.mark.parametrize(("tokens", "why"), [(1536, "99% of tokens"), (0, "as long as it needs")])
def test_several_ranks_have_even_steps_where_any_are_captured(tokens: int, why: str) -> None:
    found = resolved(engine_of(2, prompt_graph_tokens=tokens))
    assert why in reason(found, "mixed_step_ms")


@pytest.mark.parametrize(
    ("settings", "key", "value", "why"),
    [
        ({}, "weights", "auto", "as published"),
        ({}, "graph_rows", None, "steps of 1 to 256 rows are captured in 14 sizes"),
        ({"max_requests": 32}, "graph_rows", None, "steps of 1 to 32 rows are captured in 6 sizes"),
        ({}, "parallel.context_parallel_tokens", "auto", "ranks share a prompt"),
        ({"parallel": {"ranks": 1}}, "parallel.context_parallel_tokens", "auto", "there is one rank"),
        ({"parallel": {"tp": 4}}, "parallel.context_parallel_tokens", "auto", "they are a TP group"),
        ({}, "parallel.prompt_wait_steps", 16, "ranks begin short prompts together"),
        ({"parallel": {"ranks": 1}}, "parallel.prompt_wait_steps", 16, "no other rank"),
        ({}, "prompt_share", None, "no limit"),
        ({}, "host_blocks", "auto", "a tenth of the host's memory"),
    ],
)
def test_other_settings_are_chosen_by_layout_and_size(
    settings: dict[str, Any], key: str, value: object, why: str
) -> None:
    found = resolved(engine_of(**settings), model=model_of(num_hidden_layers=20))
    assert value_of(found.engine, key) == value and why in reason(found, key)


def test_one_answer_is_computed_by_all_ranks_together() -> None:
    found = resolved(engine_of(aim="latency")).engine
    assert (found.parallel.tp, found.parallel.dp, found.parallel.ep) == (4, 1, 1)
    assert (found.balance.redundant, found.parallel.prompt_wait_steps) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "role", "tokens"),
    [
        ({}, WorkerRole.DECODE, 4096),
        ({"aim": "throughput"}, WorkerRole.DECODE, 16384),
        ({"parallel": {"ranks": 1}, "aim": "latency"}, WorkerRole.DECODE, 2048),
        # 20 layers are 36% of the FLOPs of 61.
        ({"parallel": {"ranks": 1}}, WorkerRole.DECODE, 4096),
        ({"parallel": {"tp": 4}}, WorkerRole.DECODE, 4096),
        ({}, PREFILL, 4096),
    ],
)
def test_steps_are_as_long_as_was_measured(settings: dict[str, Any], role: WorkerRole, tokens: int) -> None:
    small = model_of(num_hidden_layers=20)
    assert resolved(engine_of(**settings), role, small).engine.max_step_tokens == tokens


def test_a_step_has_room_for_every_request_and_its_drafts() -> None:
    found = resolved(engine_of(1, max_requests=400, aim="latency"), model=model_of("moonlight", "bf16"))
    assert (found.engine.drafts.next_n, found.engine.max_step_tokens) == ("auto", 2400)


def test_steps_are_shorter_where_memory_is_scarce() -> None:
    found = resolved(engine_of(8, aim="throughput"), card="h100")
    assert found.engine.max_step_tokens == 8192
    assert "16384 would leave too little KV" in reason(found, "max_step_tokens")


def test_drafts_need_a_module_and_rows_for_them() -> None:
    assert resolved(drafts=False).engine.drafts.next_n == 0
    crowded = resolved(engine_of(max_step_tokens=512))
    assert crowded.engine.drafts.next_n == 0
    assert "576 rows of requests and drafts exceed" in reason(crowded, "drafts.next_n")
    assert resolved(role=PREFILL).engine.drafts.next_n == 1


def test_a_model_with_indexers_has_drafts_too() -> None:
    indexed = parse_model_config({**DEEPSEEK_V32, "num_nextn_predict_layers": 1})
    assert resolved(engine_of(8), model=indexed).engine.drafts.next_n == "auto"


def test_drafts_and_copies_may_take_little_of_the_kv() -> None:
    found = resolved(engine_of(8), card="h100")
    assert (found.engine.drafts.next_n, found.engine.balance.redundant) == (0, 0)
    assert "tokens of KV" in reason(found, "drafts.next_n")


@pytest.mark.parametrize("settings", [{"parallel": {"tp": 4}}, {"balance": {"interval_steps": None}}])
def test_experts_that_stay_have_no_copies(settings: dict[str, Any]) -> None:
    assert resolved(engine_of(**settings)).engine.balance.redundant == 0


def test_gpus_move_kv_in_the_largest_slots() -> None:
    found = resolved(engine_of(transfer={"slots": 4})).engine.transfer
    assert found is not None and (found.slot_bytes, found.slots) == (64 << 20, 4)
    assert resolved(engine_of()).engine.transfer is None


def test_a_format_is_chosen_once_gpus_have_shown_it() -> None:
    assert SHOWN.keys() >= SHOWN_ON_GPUS.keys()
    assert resolved().engine.kv_dtype == "auto"
    assert resolved(shown=SHOWN_ON_GPUS).engine.kv_dtype == "float8_e4m3fn"
    worse = {("kv_dtype", "float8_e4m3fn"): Shown("FP8, FP8 KV", "cuda", "FP8", within_chance=False)}
    assert resolved(shown=worse).engine.kv_dtype == "auto"


@pytest.mark.parametrize(
    ("model", "card", "chosen"),
    [
        (model_of(num_hidden_layers=20), "h200", "float8_e4m3fn"),
        (model_of(num_hidden_layers=20), "b200", "auto"),
        (model_of("moonlight", "bf16"), "h200", "auto"),
        (model_of("v32", "fp8", num_hidden_layers=8), "h200", "auto"),
    ],
)
def test_prompts_attend_in_fp8_where_that_was_shown(model: ModelConfig, card: str, chosen: str) -> None:
    assert resolved(engine_of(1), model=model, card=card).engine.prompt_attention_dtype == chosen
    assert resolved(engine_of(1, exact=True), model=model, card=card).engine.prompt_attention_dtype == "auto"


def test_exact_keeps_published_formats_whatever_was_shown() -> None:
    found = resolved(engine_of(exact=True), shown=SHOWN_ON_GPUS)
    assert found.engine.kv_dtype == "auto"
    assert reason(found, "kv_dtype") == "engine.exact keeps the published formats"


def test_formats_that_stay_are_told_with_their_reason() -> None:
    told = {each.key: each.reason for each in resolved().told}
    assert "but with earlier weights 11 of 600 answers were lost and 3 won (docs/quality-gpu.md)" in told["kv_dtype"]
    assert "on single GPUs alone" in told["prompt_attention_dtype"]
    assert "max_requests" in told and "graph_rows" not in told


@pytest.mark.parametrize("setting", ["kv_dtype=float8_e4m3fn", "weights=fp8", "query_weights=fp8"])
def test_exact_and_another_format_contradict_each_other(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.exact keeps the published formats, and engine\.{setting} changes"):
        load(EngineConfig, overrides=["backend=oracle", "exact=true", setting])


def test_an_unknown_aim_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"aim: expected .*balanced.*throughput.*latency"):
        load(EngineConfig, overrides=["backend=oracle", "aim=speed"])

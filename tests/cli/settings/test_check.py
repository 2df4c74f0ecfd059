import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from cli.settings.check import check_settings, check_weights, gateway_config
from launcher.composition import compose
from launcher.plan import MeshPlan
from mesh.errors import ConfigError
from tests.support.packed import CONFIGS
from tools.make_checkpoint import checkpoint_config

ORACLE = ("decode.engine.backend=oracle", "prefill.engine.backend=oracle")

REFUSED = pytest.raises(ConfigError, match=r"^decode-0: .* deepmesh quantize DIR --format w4a8 --out OUT, or ")


def plan(*settings: str) -> MeshPlan:
    return MeshPlan(None, prefill_workers=1, settings=(*ORACLE, *settings))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("gateway.limit.prompt_characters=8", "gateway: unknown key limit (did you mean limits?)"),
        ("prefill.engine.transfer=null", "prefill-0: engine.transfer is required"),
        ("scheduler.lease.seconds=0", "scheduler: lease.seconds: expected number > 0"),
        ("decode.engine.max_requests=many", "decode-0: engine.max_requests: expected integer >= 1"),
        ("decode.engine.drafts.next_n=many", "decode-0: engine.drafts.next_n: expected "),
        ("decode.engine=1", "decode-0: engine: expected keys"),
        ("gateway.api_keys=alice", "gateway: api_keys: expected list of keys"),
        ("gateway.api_keys=[{name: [], key: x}]", "gateway: api_keys[].name: expected text"),
        ("gateway.api_keys=[{name: alice}]", "gateway: api_keys.0: alice: give either key or key_sha256"),
        ("decoed.engine.max_requests=8", "--set decoed.engine.max_requests=8: expected SERVICE.KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_named_with_the_service(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_settings(compose(plan(setting)))
    assert raised.value.message.startswith(reason)


@pytest.mark.parametrize(("key", "value"), [("kv_dtype", "float8_e4m3fn"), ("kv_scale", "0.5"), ("kv_namespace", "r1")])
def test_workers_that_could_not_share_kv_are_refused(key: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^prefill.engine.{key}=\S+ and decode.engine.{key}={value}: .* set both alike"
    ):
        check_settings(compose(plan(f"decode.engine.{key}={value}")))
    check_settings(compose(plan(*(f"{role}.engine.{key}={value}" for role in ("prefill", "decode")))))
    # Where there is no prefill worker, its settings do not count.
    check_settings(compose(MeshPlan(None, settings=(ORACLE[0], f"decode.engine.{key}={value}"))))


def test_right_settings_give_every_service_its_configuration() -> None:
    configs = check_settings(compose(plan("gateway.api_keys=[{name: alice, key: secret-of-alice}]")))
    assert list(configs) == ["scheduler", "prefill-0", "decode-0", "gateway"]
    assert gateway_config(configs).api_keys[0].name == "alice"


@pytest.mark.parametrize(
    ("gpus", "weights", "verdict"),
    [
        pytest.param(("0",), "auto", REFUSED, id="GPU"),
        pytest.param(("0",), "w4a8", nullcontext(), id="GPU, quantized again"),
        pytest.param((), "auto", nullcontext(), id="CPU"),
    ],
)
def test_packed_weights_are_refused_on_a_gpu(
    gpus: tuple[str, ...], weights: str, verdict: AbstractContextManager[object], tmp_path: Path
) -> None:
    section = {"quantization_config": CONFIGS["gptq"]}
    (tmp_path / "config.json").write_text(json.dumps(checkpoint_config("tiny") | section))
    specs = compose(MeshPlan(tmp_path, settings=(f"decode.engine.weights={weights}",), gpus=gpus))
    configs = check_settings(specs)
    with verdict:
        check_weights(specs, configs)


def test_a_model_that_ranks_cannot_divide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(checkpoint_config("tiny")))
    specs = compose(MeshPlan(tmp_path, settings=("decode.engine.parallel.tp=3",)))
    with pytest.raises(ConfigError, match=r"^decode-0: engine\.parallel\.tp=3 does not divide the model's 4 attention"):
        check_weights(specs, check_settings(specs))

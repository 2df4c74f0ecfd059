from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvstore.config import KvStoreConfig
from launcher.composition import STORES_MEMORY, compose, device_list, idle_gpus, split_settings
from launcher.plan import MeshPlan, ServiceSpec
from mesh.config_values import overridden
from mesh.errors import ConfigError


def by_name(plan: MeshPlan, cpu_count: int = 8) -> dict[str, ServiceSpec]:
    return {spec.name: spec for spec in compose(plan, cpu_count)}


def last_value(spec: ServiceSpec, key: str) -> object:
    found = [setting.partition("=")[2] for setting in spec.settings if setting.partition("=")[0] == key]
    return yaml.safe_load(found[-1]) if found else None


def test_a_mesh_is_a_scheduler_then_workers_then_a_gateway() -> None:
    assert list(by_name(MeshPlan(None, decode_workers=2))) == ["scheduler", "decode-0", "decode-1", "gateway"]


def test_stores_and_prefill_workers_start_before_decode_workers() -> None:
    plan = MeshPlan(None, decode_workers=2, prefill_workers=1, store_ports=(4010, 4011))
    names = ["scheduler", "kvstore-0", "kvstore-1", "prefill-0", "decode-0", "decode-1", "gateway"]
    assert list(by_name(plan)) == names


def test_workers_and_scheduler_are_told_the_endpoints_of_the_stores() -> None:
    specs = by_name(MeshPlan(None, prefill_workers=1, store_ports=(4010, 4011)))
    assert [specs[name].port for name in ("kvstore-0", "kvstore-1")] == [4010, 4011]
    for name in ("scheduler", "prefill-0", "decode-0"):
        assert last_value(specs[name], "stores") == ["127.0.0.1:4010", "127.0.0.1:4011"]
    assert last_value(specs["gateway"], "stores") is None


@pytest.mark.parametrize("plan", [MeshPlan(None, prefill_workers=1), MeshPlan(None, store_ports=(4010,))])
def test_workers_transfer_kv_if_there_are_prefill_workers_or_stores(plan: MeshPlan) -> None:
    assert last_value(by_name(plan)["decode-0"], "engine.transfer") == {}
    assert last_value(by_name(MeshPlan(None))["decode-0"], "engine.transfer") is None


def test_gpus_that_no_worker_takes_are_told() -> None:
    plan = MeshPlan(None, gpus=("0", "1", "2"), parallel={"decode": {"ranks": 2}})
    assert idle_gpus(plan, compose(plan)) == (
        "2 of 3 GPUs serve the model, which needs no more: --gpus 3 divides it among all"
    )
    assert idle_gpus(replace(plan, gpus=("0", "1")), compose(replace(plan, gpus=("0", "1")))) is None
    assert idle_gpus(MeshPlan(None), compose(MeshPlan(None))) is None


def test_every_service_is_told_the_endpoint_of_the_scheduler() -> None:
    specs = by_name(MeshPlan(None, scheduler_port=4002))
    assert specs["scheduler"].port == 4002
    assert last_value(specs["decode-0"], "scheduler") == last_value(specs["gateway"], "scheduler") == "127.0.0.1:4002"


@pytest.mark.parametrize(("ports", "share"), [((4010,), None), ((4010, 4011), 0.125)], ids=["one", "two"])
def test_stores_of_a_machine_divide_its_memory(ports: tuple[int, ...], share: float | None) -> None:
    specs = by_name(MeshPlan(None, prefill_workers=1, store_ports=ports))
    assert last_value(specs["kvstore-0"], "memory_share") == share
    assert KvStoreConfig().memory_share == STORES_MEMORY


def test_everyone_is_told_of_every_scheduler() -> None:
    specs = by_name(MeshPlan(None, scheduler_port=4002, more_scheduler_ports=(4003,)))
    assert (specs["scheduler"].port, specs["scheduler-1"].port) == (4002, 4003)
    everyone = "127.0.0.1:4002,127.0.0.1:4003"
    assert last_value(specs["decode-0"], "scheduler") == last_value(specs["gateway"], "scheduler") == everyone


def test_waiting_for_a_checkpoint_may_take_its_time() -> None:
    specs = by_name(MeshPlan(None, prefill_workers=1, store_ports=(4010,)))
    assert {name for name, spec in specs.items() if spec.ready_seconds is None} == {"prefill-0", "decode-0", "gateway"}


def test_each_gateway_has_an_id_and_ports_of_its_own() -> None:
    specs = by_name(MeshPlan(None, gateways=2, http_port=8000, grpc_port=8001, metrics_port=9001))
    assert [last_value(specs[name], "gateway_id") for name in ("gateway", "gateway-1")] == ["gateway", "gateway-1"]
    assert (last_value(specs["gateway-1"], "http.port"), specs["gateway-1"].port) == (8010, 8011)
    assert len({spec.metrics_port for spec in specs.values()}) == len(specs)


def test_workers_have_ids_of_their_own_and_any_port() -> None:
    specs = by_name(MeshPlan(None, decode_workers=2))
    assert [last_value(specs[name], "worker_id") for name in ("decode-0", "decode-1")] == ["decode-0", "decode-1"]
    assert specs["decode-0"].port is None


def test_workers_serve_the_model_that_the_gateway_tokenizes_for(tmp_path: Path) -> None:
    directory = tmp_path / "a name: with, [odd] 'characters'"
    specs = by_name(MeshPlan(directory))
    assert last_value(specs["decode-0"], "engine.model_dir") == str(directory)
    assert last_value(specs["gateway"], "models") == [{"tokenizer_dir": str(directory)}]


def test_workers_share_the_cores() -> None:
    assert last_value(by_name(MeshPlan(None, decode_workers=3), 8)["decode-0"], "engine.threads") == 2
    assert last_value(by_name(MeshPlan(None, decode_workers=3), 2)["decode-0"], "engine.threads") == 1


def test_prefill_workers_take_their_share_of_the_cores() -> None:
    specs = by_name(MeshPlan(None, decode_workers=1, prefill_workers=3), 8)
    assert [last_value(specs[name], "engine.threads") for name in ("decode-0", "prefill-2")] == [2, 2]


def test_workers_take_half_of_the_memory_between_them() -> None:
    specs = by_name(MeshPlan(None, decode_workers=2, prefill_workers=2), 8)
    assert last_value(specs["decode-0"], "engine.kv_memory_fraction") == 0.125
    assert last_value(by_name(MeshPlan(None))["decode-0"], "engine.kv_memory_fraction") is None


def test_every_worker_computes_on_a_gpu_of_its_own() -> None:
    specs = by_name(MeshPlan(None, decode_workers=2, prefill_workers=1, gpus=("0", "1", "2")))
    assert specs["decode-1"].environment == {"CUDA_VISIBLE_DEVICES": "1,2,0"}
    assert device_list(list(specs.values())) == "prefill-0 on GPU 2, decode-0 on GPU 0, decode-1 on GPU 1"
    for key in ("engine.memory_share", "engine.kv_memory_fraction"):
        assert last_value(specs["decode-0"], key) is None
    assert specs["scheduler"].environment == specs["gateway"].environment == {}


def test_gateways_await_a_restart_on_a_gpu_longer() -> None:
    def patience(*settings: str, gpus: tuple[str, ...] = ("0",)) -> object:
        specs = by_name(MeshPlan(None, settings=settings, gpus=gpus))
        return last_value(specs["gateway"], "dispatch.worker_seconds")

    assert patience() == 120 and patience("gateway.dispatch.worker_seconds=5") == 5
    assert patience(gpus=()) is patience("decode.engine.device=cpu") is None


def test_more_workers_than_gpus_divide_their_memory() -> None:
    specs = by_name(MeshPlan(None, decode_workers=1, prefill_workers=2, gpus=("3", "5")))
    shares = {name: last_value(specs[name], "engine.memory_share") for name in ("decode-0", "prefill-0", "prefill-1")}
    assert shares == {"decode-0": 0.5, "prefill-0": None, "prefill-1": 0.5}
    assert "decode-0 on GPU 3 (1/2 of it)" in device_list(list(specs.values()))


@pytest.mark.parametrize("workers", [3, 6, 7])
def test_shares_of_a_gpu_add_up_to_one(workers: int) -> None:
    specs = by_name(MeshPlan(None, decode_workers=workers, gpus=("0",)))
    share = last_value(specs["decode-0"], "engine.memory_share")
    assert isinstance(share, float)
    assert 0.99 < share * workers <= 1


@pytest.mark.parametrize("setting", ["decode.engine.device=cpu", "decode.engine.backend=oracle"])
def test_a_worker_that_is_to_compute_elsewhere_takes_no_gpu(setting: str) -> None:
    specs = by_name(MeshPlan(None, decode_workers=1, prefill_workers=1, settings=(setting,), gpus=("0",)))
    assert specs["decode-0"].gpu is None
    assert last_value(specs["decode-0"], "engine.kv_memory_fraction") == 0.25
    assert last_value(specs["prefill-0"], "engine.memory_share") is None
    assert device_list(list(specs.values())) == "prefill-0 on GPU 0, decode-0 on the CPU"


def test_workers_are_divided_as_planned_unless_settings_say() -> None:
    plan = MeshPlan(
        None,
        prefill_workers=1,
        settings=("prefill.engine.parallel.tp=2",),
        gpus=("0", "1", "2", "3"),
        parallel={service: {"ranks": 2, "ep": 1} for service in ("decode", "prefill")},
    )
    specs = by_name(plan)
    for name in ("decode-0", "prefill-0"):
        assert {"engine.parallel.ranks=2", "engine.parallel.ep=1"} <= set(specs[name].settings)
    assert specs["prefill-0"].settings[-1] == "engine.parallel.tp=2"
    assert device_list(list(specs.values())) == "prefill-0 on GPUs 2, 3, decode-0 on GPUs 0, 1"


def test_each_role_may_have_its_own_number_of_ranks() -> None:
    parallel = {"prefill": {"ranks": 1}, "decode": {"ranks": 3}}
    specs = by_name(MeshPlan(None, prefill_workers=1, gpus=("0", "1", "2", "3"), parallel=parallel))
    assert [last_value(specs[name], "engine.parallel.ranks") for name in ("prefill-0", "decode-0")] == [1, 3]
    assert device_list(list(specs.values())) == "prefill-0 on GPU 3, decode-0 on GPUs 0, 1, 2"


@pytest.mark.parametrize("setting", ["engine.parallel.dp=2", "engine.parallel={dp: 2}", "engine={parallel: {dp: 2}}"])
def test_ranks_share_the_cores_however_their_number_is_written(setting: str) -> None:
    plan = MeshPlan(None, decode_workers=2, settings=(f"decode.{setting}",))
    assert "engine.threads=2" in by_name(plan)["decode-0"].settings


def test_a_single_worker_may_take_every_core() -> None:
    assert last_value(by_name(MeshPlan(None))["decode-0"], "engine.threads") is None


def test_a_setting_reaches_its_service_alone_and_beats_ours() -> None:
    specs = by_name(MeshPlan(None, decode_workers=2, settings=("decode.engine.threads=7", "gateway.http.port=1")))
    assert [last_value(specs[name], "engine.threads") for name in ("decode-0", "decode-1")] == [7, 7]
    assert last_value(specs["gateway"], "http.port") == 1
    assert last_value(specs["gateway"], "engine.threads") is None


@pytest.mark.parametrize("setting", ["engine.max_requests=8", "decode=8", "decode.engine", "store.port=1", ""])
def test_a_setting_of_no_service_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"expected SERVICE\.KEY=VALUE"):
        split_settings([setting])


def test_a_misspelled_service_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean decode\?"):
        split_settings(["decod.engine.max_requests=8"])
    with pytest.raises(ConfigError, match=r"gateway$"):
        split_settings(["decode=8"])


def test_a_setting_of_ours_beats_the_port_of_a_command() -> None:
    command = ServiceSpec("s", "scheduler", None, ("a=1", "server.port=9"), 1.0).command(5)
    assert command[1:4] == ["-P", "-m", "scheduler"]
    assert command.index("server.port=5") < command.index("a=1") < command.index("server.port=9")


def test_metrics_have_fixed_ports() -> None:
    few = by_name(MeshPlan(None, metrics_port=9001))
    many = by_name(MeshPlan(None, decode_workers=64, prefill_workers=64, store_ports=(4010, 4011), metrics_port=9001))
    names = ("gateway", "scheduler", "kvstore-1", "prefill-3", "decode-0")
    assert [many[name].metrics_port for name in names] == [9001, 9002, 9012, 9104, 9201]
    assert all(many[name].metrics_port == spec.metrics_port for name, spec in few.items())
    assert len({spec.metrics_port for spec in many.values()}) == len(many)
    assert "server.metrics_port=9201" in many["decode-0"].command(5)


def test_metrics_take_free_ports_by_default() -> None:
    assert {spec.metrics_port for spec in compose(MeshPlan(None))} == {0}


def test_only_the_gateway_listens_for_others() -> None:
    specs = by_name(MeshPlan(None, host="0.0.0.0"))
    keys = ("http.host", "server.host", "server.metrics_host")
    assert [last_value(specs["gateway"], key) for key in keys] == ["0.0.0.0", "0.0.0.0", "127.0.0.1"]
    assert last_value(specs["scheduler"], "server.host") is last_value(specs["decode-0"], "server.host") is None
    assert specs["gateway"].host == "127.0.0.1"
    assert by_name(MeshPlan(None, host="192.0.2.7"))["gateway"].host == "192.0.2.7"


@pytest.mark.parametrize(("host", "called"), [("::", "::1"), ("::1", "::1"), ("2001:db8::1", "2001:db8::1")])
def test_a_gateway_may_listen_on_ipv6(host: str, called: str) -> None:
    gateway = by_name(MeshPlan(None, host=host))["gateway"]
    values = overridden(gateway.settings)
    assert [values["http"]["host"], values["server"]["host"], gateway.host] == [host, host, called]


def test_a_worker_with_a_new_role_is_divided_alike() -> None:
    settings = ("prefill.engine.parallel.tp=2", "decode.engine={parallel: {dp: 4}}", "decode.engine.max_requests=3")
    specs = by_name(MeshPlan(None, prefill_workers=1, settings=settings))

    def as_the_other(name: str) -> list[str]:
        said = last_value(specs[name], "other_role")
        assert isinstance(said, list)
        return said

    undone = "engine.parallel.tp=null"
    assert as_the_other("prefill-0") == [undone, "engine={parallel: {dp: 4}}", "engine.max_requests=3"]
    assert as_the_other("decode-0") == ["engine.parallel.dp=null", "engine.parallel.tp=2"]
    of_split = {"prefill": {"ranks": 2}, "decode": {"ranks": 2}}
    specs = by_name(MeshPlan(None, prefill_workers=1, parallel=of_split))
    assert as_the_other("prefill-0") == ["engine.parallel.ranks=2"]

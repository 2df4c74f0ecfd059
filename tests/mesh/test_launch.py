import json
from pathlib import Path

import pytest

from tests.support.forking import run_forked

PROGRAM = """
import logging, sys
from grpc._cython.cygrpc import ExecuteBatchError
from mesh.config import ServiceConfig
from mesh.errors import CheckpointError, ConfigError, NoWorker
from mesh.launch import launch

class ProbeConfig(ServiceConfig):
    then: str = "end"

async def main(config):
    logging.getLogger("grpc._cython.cygrpc").debug("polled")
    try:
        raise ExecuteBatchError("its client has left")
    except ExecuteBatchError:
        logging.getLogger("grpc._cython.cygrpc").exception("raised in core")
    logging.getLogger("probe").debug("details")
    logging.getLogger("probe").info("serving", extra={"fields": {"then": config.then}})
    if config.then == "fail":
        raise NoWorker("no worker serves it: start one")
    if config.then == "bad checkpoint":
        raise CheckpointError("model.safetensors is missing: download it")
    if config.then == "bug":
        raise ZeroDivisionError

sys.exit(launch("probe", ProbeConfig, main))
"""


async def test_a_clean_end_exits_with_zero_and_writes_all_lines() -> None:
    status, _, stderr = await run_forked("-c", PROGRAM)
    assert status == 0
    assert stderr.strip().endswith("INFO  probe      serving then=end")


async def test_the_file_and_the_overrides_reach_the_service(tmp_path: Path) -> None:
    path = tmp_path / "probe.yaml"
    path.write_text("then: from the file\nobserve: {log_level: WARNING}\n")
    assert "from the file" not in (await run_forked("-c", PROGRAM, "--config", str(path)))[2]
    assert (
        "from the file"
        in (await run_forked("-c", PROGRAM, "--config", str(path), "--set", "observe.log_level=INFO"))[2]
    )


async def test_a_second_file_is_laid_over_the_first(tmp_path: Path) -> None:
    path, secret = tmp_path / "probe.yaml", tmp_path / "secret.yaml"
    path.write_text("then: from the file\nobserve: {log_level: INFO}\n")
    secret.write_text("then: from the secret\n")
    assert "from the secret" in (await run_forked("-c", PROGRAM, "--config", str(path), "--config", str(secret)))[2]


async def test_debug_has_our_own_details_and_not_those_of_grpc() -> None:
    _, _, stderr = await run_forked("-c", PROGRAM, "--set", "observe.log_level=DEBUG")
    assert "details" in stderr and "polled" not in stderr


async def test_logs_are_json_by_one_setting() -> None:
    _, _, stderr = await run_forked("-c", PROGRAM, "--set", "observe.log_format=json")
    assert json.loads(stderr)["message"] == "serving"


async def test_an_unknown_key_is_one_line_and_status_2() -> None:
    status, _, stderr = await run_forked("-c", PROGRAM, "--set", "sever.port=1")
    assert (status, stderr) == (2, "probe: configuration: unknown key sever (did you mean server?)\n")


async def test_an_error_that_starting_again_cannot_help_is_status_2() -> None:
    status, _, stderr = await run_forked("-c", PROGRAM, "--set", "then=bad checkpoint")
    assert (status, stderr.splitlines()[-1]) == (2, "probe: model.safetensors is missing: download it")


async def test_an_error_that_may_pass_is_status_1() -> None:
    status, _, stderr = await run_forked("-c", PROGRAM, "--set", "then=fail")
    assert (status, stderr.splitlines()[-1]) == (1, "probe: no worker serves it: start one")


async def test_a_bug_shows_its_traceback() -> None:
    status, _, stderr = await run_forked("-c", PROGRAM, "--set", "then=bug")
    assert status == 1
    assert stderr.strip().endswith("ZeroDivisionError")


@pytest.mark.parametrize("module", ["scheduler", "kvstore", "decode_svc", "prefill_svc", "gateway"])
async def test_usage_names_the_module_that_was_run(module: str) -> None:
    _, out, _ = await run_forked("-m", module, "--help")
    assert out.startswith(f"usage: python -m {module} ")


async def test_settings_of_the_environment_give_way_to_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPMESH_SETTINGS", '["then=secret"]')
    assert "then=secret" in (await run_forked("-c", PROGRAM))[2]
    assert "then=shown" in (await run_forked("-c", PROGRAM, "--set", "then=shown"))[2]
    monkeypatch.setenv("DEEPMESH_SETTINGS", "then=secret")
    status, _, stderr = await run_forked("-c", PROGRAM)
    assert (status, stderr) == (2, "probe: DEEPMESH_SETTINGS must be a JSON list of KEY=VALUE\n")

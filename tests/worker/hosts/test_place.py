"""Which host a service runs on, from what launchers set."""

from collections.abc import Mapping

import pytest

from mesh.config import SecurityConfig, ServerConfig
from mesh.errors import ConfigError
from tests.support.two_hosts import worker_config
from worker.config import WorkerConfig
from worker.hosts.place import HostPlace, find_host

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LEADER_WORKER_SET = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "decode-0.decode.mesh"}


def config(worker_id: str | None = None, port: int = 50051, plaintext: bool = False) -> WorkerConfig:
    return worker_config().model_copy(
        update={
            "worker_id": worker_id,
            # Every address: no network device has to be found.
            "server": ServerConfig(host="0.0.0.0", port=port),
            "security": SecurityConfig(plaintext=plaintext),
        }
    )


def test_torchruns_variables_name_host_and_first_host() -> None:
    place, identified = find_host(config(), TORCHRUN)
    assert place == HostPlace(1, "127.0.0.1:50051")
    assert identified.worker_id == "127.0.0.1:50051"


def test_a_leader_worker_sets_variables_come_before_torchruns() -> None:
    place, _ = find_host(config(plaintext=True), {**LEADER_WORKER_SET, "RANK": "0"})
    assert place == HostPlace(1, "decode-0.decode.mesh:50051")


def test_a_nodes_rank_takes_the_place_of_a_rank() -> None:
    variables = {"NODE_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1"}
    assert find_host(config(), variables)[0] == HostPlace(1, "[::1]:50051")


def test_a_worker_on_one_host_looks_at_no_variable() -> None:
    parallel = config().engine.parallel.model_copy(update={"hosts": 1})
    engine = config().engine.model_copy(update={"parallel": parallel})
    alone = config().model_copy(update={"engine": engine})
    assert find_host(alone, TORCHRUN) == (HostPlace(), alone)


def test_an_id_that_is_configured_stays() -> None:
    assert find_host(config("decode-7"), TORCHRUN)[1].worker_id == "decode-7"


@pytest.mark.parametrize(
    "variables, complaint",
    [
        ({}, "engine.parallel.hosts=2, and WORLD_SIZE is not set: start one service on each host with torchrun"),
        ({"WORLD_SIZE": "2"}, "and NODE_RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "and MASTER_ADDR is not set"),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, "engine.parallel.hosts=2, and WORLD_SIZE is 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is 8: each host has one service"),
        ({**TORCHRUN, "RANK": "2"}, "RANK is 2: the 2 hosts are counted from 0"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is no number from 0 on"),
        (LEADER_WORKER_SET, "LWS_LEADER_ADDRESS=decode-0.decode.mesh is not loopback: set security.tls"),
    ],
)
def test_wrong_variables_are_one_clear_error(variables: Mapping[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_host(config(), variables)
    assert complaint in raised.value.message


def test_hosts_need_a_port_that_all_know() -> None:
    with pytest.raises(ConfigError, match=r"engine.parallel.hosts needs a server.port that is not 0"):
        find_host(config(port=0), TORCHRUN)

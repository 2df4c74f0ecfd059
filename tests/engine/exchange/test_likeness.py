from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from engine.exchange.likeness import check_likeness
from mesh.errors import CheckpointError, ConfigError, MeshError

MODEL: Mapping[str, object] = {"hidden_size": 128, "yarn": None, "quantization": {"nvfp4": frozenset(("a", "b"))}}


def said_by_all(devices: list[str], models: list[Mapping[str, object]]) -> list[MeshError | None]:
    """By host, the error that it raises."""
    store, hosts = HashStore(), len(devices)

    def act(host: int) -> MeshError | None:
        try:
            check_likeness(store, host, hosts, devices[host], models[host])
        except MeshError as error:
            return error
        return None

    with ThreadPoolExecutor(hosts) as pool:
        return list(pool.map(act, range(hosts)))


def test_hosts_with_one_model_and_kind_of_device_go_on() -> None:
    assert said_by_all(["cuda"] * 3, [MODEL, dict(MODEL), dict(MODEL)]) == [None] * 3


@pytest.mark.parametrize(
    ("device", "model", "error", "words"),
    [
        ("cpu", MODEL, ConfigError, "host 2 of the worker computes on cpu, and host 0 on cuda: set engine.device=cuda"),
        ("cuda", {**MODEL, "hidden_size": 192}, CheckpointError, "host 2 .* its hidden_size is 192, and not 128; all"),
        ("cuda", {**MODEL, "quantization": {}}, CheckpointError, "host 2 of the worker has another model than host 0"),
    ],
    ids=["device", "dimension", "quantization"],
)
def test_every_host_says_which_one_differs(
    device: str, model: Mapping[str, object], error: type[MeshError], words: str
) -> None:
    for raised in said_by_all(["cuda", "cuda", device], [MODEL, MODEL, model]):
        assert raised is not None
        with pytest.raises(error, match=words):
            raise raised

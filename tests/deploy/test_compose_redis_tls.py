"""What deploy/compose.redis-tls.yaml tells Redis and a store, told to a real Redis and a store's index."""

import asyncio
from pathlib import Path

import pytest
import yaml

from kvstore.config import KvStoreConfig
from kvstore.redis_index import RedisIndex
from mesh.config_values import load
from mesh.errors import IndexUnavailable
from mesh.ports import free_port
from mesh.rpc.identity import Role
from tests.support.certificates import certified
from tests.support.other_version import ROOT
from tests.support.redis_server import BINARY, needs_redis
from tests.support.waiting import eventually

pytestmark = [pytest.mark.check("redis"), needs_redis]
SERVICES = yaml.safe_load((ROOT / "deploy/compose.redis-tls.yaml").read_text())["services"]


def index(overrides: list[str], store_id: str) -> RedisIndex:
    patient = "index.timeout_seconds=20"
    config = load(KvStoreConfig, ROOT / "deploy/compose/kvstore.yaml", [*overrides, patient])
    return RedisIndex(config.index, store_id, "first")


def certificates(directory: Path) -> Path:
    """By the names that the file gives them."""
    redis = certified(directory, Role.KVSTORE, "redis", hosts=["localhost"])
    store = certified(directory, Role.KVSTORE, "store")
    names = {"ca.crt": redis.ca, "redis.crt": redis.certificate, "redis.key": redis.key}
    for name, file in {**names, "store.crt": store.certificate, "store.key": store.key}.items():
        (directory / name).symlink_to(file)
    return directory


async def test_only_a_certificate_lets_the_store_in(tmp_path: Path) -> None:
    directory, port = certificates(tmp_path), free_port()

    def told(service: str) -> list[str]:
        places = {"/tls/": f"{directory}/", "redis:6379": f"localhost:{port}"}
        words = [str(port) if word == "6379" else str(word) for word in SERVICES[service]["command"]]
        for there, here in places.items():
            words = [word.replace(there, here) for word in words]
        return words

    settings = told("kvstore")
    overrides = [settings[place + 1] for place, word in enumerate(settings) if word == "--set"]
    redis = await asyncio.create_subprocess_exec(
        str(BINARY), *told("redis")[1:], "--dir", str(directory), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        store = index(overrides, "with")

        async def let_in() -> bool:
            try:
                return await store.renew() == 0
            except IndexUnavailable:
                return False

        await eventually(let_in)
        await store.add([bytes(24)])
        found = await store.match([bytes(24)])
        assert found is not None and (found.store_id, found.blocks) == ("with", 1)
        await store.close()
        for without in (overrides[:1], [overrides[0].replace("rediss", "redis")]):
            with pytest.raises(IndexUnavailable):
                await asyncio.wait_for(index(without, "without").renew(), 30)
    finally:
        redis.kill()
        await redis.wait()

import pytest

from kvstore.config import KvStoreConfig
from kvstore.quotas import disk_quotas, memory_quotas
from mesh.config_values import validate
from mesh.domain.shares import tenant_tag
from mesh.errors import ConfigError
from tests.support.stores import store_config

BLOCK_BYTES = 1000


def test_a_named_tenant_has_its_own_quota_others_the_default() -> None:
    config = store_config(
        quota={"memory_bytes": 5999, "disk_bytes": 0}, tenants=[{"name": "acme", "memory_bytes": 70_000}]
    )
    memory = memory_quotas(config.quota, config.tenants, BLOCK_BYTES)
    disk = disk_quotas(config.quota, config.tenants, BLOCK_BYTES)
    assert [quotas.of(tenant_tag("acme")) for quotas in (memory, disk)] == [70, None]
    assert [quotas.of(tag) for quotas in (memory, disk) for tag in (b"", tenant_tag("other"))] == [5, 5, 0, 0]


def test_a_tenant_has_one_quota() -> None:
    with pytest.raises(ConfigError, match="twice"):
        validate(KvStoreConfig, {"tenants": [{"name": "acme"}, {"name": "acme", "disk_bytes": 1}]}, "test")

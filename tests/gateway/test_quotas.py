from typing import Any

import pytest
from pydantic import SecretStr

from gateway.config import ApiKeyConfig
from gateway.processes.ledger import Ledger
from gateway.quotas import Quotas
from mesh.errors import Overloaded
from tests.support.gateways import running_mesh


def key(name: str, **quotas: Any) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, key=SecretStr(f"{name}-secret"), **quotas)


def quotas_of(keys: list[ApiKeyConfig]) -> Quotas:
    return Quotas(keys, Ledger([each.name for each in keys]))


def refused_for(quotas: Quotas, tenant: str, now: float) -> int | None:
    with pytest.raises(Overloaded) as caught:
        quotas.admit(tenant, now)
    return caught.value.retry_after_ms


def test_a_minutes_requests_may_come_at_once() -> None:
    quotas = quotas_of([key("alice", requests_per_minute=6), key("bob")])
    for _ in range(6):
        quotas.admit("alice", 100.0)
    assert refused_for(quotas, "alice", 100.0) == 10_000
    assert refused_for(quotas, "alice", 104.0) == 6_000
    quotas.admit("alice", 110.0)
    for _ in range(100):
        quotas.admit("bob", 110.0)


def test_a_refused_request_costs_nothing() -> None:
    quotas = quotas_of([key("alice", requests_per_minute=1)])
    quotas.admit("alice", 0.0)
    for _ in range(10):
        refused_for(quotas, "alice", 30.0)
    quotas.admit("alice", 60.0)


def test_tokens_beyond_the_minute_are_waited_for() -> None:
    quotas = quotas_of([key("alice", tokens_per_minute=600)])
    quotas.admit("alice", 0.0)
    quotas.charge("alice", 700, 0.0)
    assert refused_for(quotas, "alice", 0.0) == 10_100
    quotas.admit("alice", 10.2)


async def test_a_key_over_its_quota_is_told_when_to_return() -> None:
    keys = (key("alice", tokens_per_minute=10), key("bob"))
    body = {"model": "oracle", "prompt": [5, 6, 7], "max_tokens": 8}
    async with running_mesh(api_keys=keys) as mesh:

        async def ask(name: str) -> Any:
            headers = {"authorization": f"Bearer {name}-secret"}
            return await mesh.http.post("/v1/completions", json=body, headers=headers)

        assert (await ask("alice")).status_code == 200
        refused = await ask("alice")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "12")
        assert (await ask("bob")).status_code == 200

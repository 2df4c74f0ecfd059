import pytest
from pydantic import SecretStr

from gateway.config import ApiKeyConfig
from gateway.processes.ledger import Ledger
from gateway.tenants import Tenants
from mesh.errors import Overloaded, Unauthenticated

KEYS = Tenants(
    [
        ApiKeyConfig(name="alice", key=SecretStr("alice-secret"), max_concurrent=2),
        ApiKeyConfig(name="bob", key=SecretStr("bob-secret"), cache_salt="shared"),
        ApiKeyConfig(name="carol", key=SecretStr("carol-secret"), cache_salt="shared"),
    ],
    Ledger(["alice", "bob", "carol"]),
)


@pytest.mark.parametrize(
    "authorization", [None, "", "alice-secret", "Basic alice-secret", "Bearer", "Bearer wrong", "Bearer ключ"]
)
def test_a_call_without_a_known_key_is_refused(authorization: str | None) -> None:
    with pytest.raises(Unauthenticated):
        KEYS.authenticate(authorization)


def test_a_key_names_its_tenant() -> None:
    assert KEYS.authenticate("bearer alice-secret").name == "alice"


def test_without_keys_everyone_may_call() -> None:
    assert Tenants([], Ledger([])).authenticate(None).cache_salt == b""


def test_tenants_share_a_cache_only_where_they_are_told_to() -> None:
    alice, bob, carol = (KEYS.authenticate(f"Bearer {name}-secret").cache_salt for name in ("alice", "bob", "carol"))
    assert bob == carol
    assert len({alice, bob, b""}) == 3


def test_a_tenant_gets_its_share_at_once() -> None:
    alice = KEYS.authenticate("Bearer alice-secret")
    with alice.admitted():
        with alice.admitted(), pytest.raises(Overloaded, match="its limit") as caught, alice.admitted():
            pass
        assert caught.value.retry_after_ms is not None
        with alice.admitted():
            assert alice.live == 2
    assert alice.live == 0

import os

import pytest
from pydantic import SecretStr

from gateway.config import ApiKeyConfig
from gateway.processes.ledger import Ledger
from gateway.quotas import Quotas
from gateway.tenants import Tenants
from mesh.errors import Overloaded

ALICE = ApiKeyConfig(name="alice", key=SecretStr("alice-secret"), requests_per_minute=3, max_concurrent=2)


def in_a_process(ledger: Ledger, number: int) -> int:
    """Fork: 0 in the new process, whose `number` it is, and there alone."""
    process_id = os.fork()
    if process_id == 0:
        ledger.process = number
    return process_id


def test_processes_use_up_one_allowance_together() -> None:
    ledger = Ledger(["alice"], 2)
    child = in_a_process(ledger, 1)
    if child == 0:
        Quotas([ALICE], ledger).admit("alice", 0.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    quotas = Quotas([ALICE], ledger)
    quotas.admit("alice", 0.0)
    quotas.admit("alice", 0.0)
    with pytest.raises(Overloaded, match="used its requests"):
        quotas.admit("alice", 0.0)


def test_none_of_the_uses_of_many_processes_is_lost() -> None:
    ledger, uses = Ledger(["alice"], 4), 500
    key = ALICE.model_copy(update={"requests_per_minute": 10_000})
    Quotas([key], ledger).admit("alice", 0.0)
    children = []
    for number in range(1, 4):
        child = in_a_process(ledger, number)
        if child == 0:
            quotas = Quotas([key], ledger)
            for _ in range(uses):
                quotas.admit("alice", 0.0)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert ledger.allowance("alice", "requests")[0] == 10_000 - 3 * uses - 1


def test_generations_of_all_living_processes_count() -> None:
    ledger = Ledger(["alice"], 2)
    child = in_a_process(ledger, 1)
    if child == 0:
        # It dies with both of them live.
        tenant = Tenants([ALICE], ledger).authenticate("Bearer alice-secret")
        with tenant.admitted(), tenant.admitted():
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tenant = Tenants([ALICE], ledger).authenticate("Bearer alice-secret")
    with pytest.raises(Overloaded, match="has 2 generations running"), tenant.admitted():
        pass
    ledger.forget(1)
    with tenant.admitted():
        assert tenant.live == 1

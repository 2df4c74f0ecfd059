from typing import Any

import msgspec
import pytest

from gateway.stream_tokens import StreamClaim, StreamSeal, request_digest
from mesh.domain.constraints import Constraint
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.errors import UnknownStream

CLAIM = StreamClaim(b"i" * 16, "alice", "model", b"w", b"r", 7, 1000)
SEAL = StreamSeal("a secret of the gateways")


def test_another_gateway_with_the_secret_opens_what_one_sealed() -> None:
    assert StreamSeal("a secret of the gateways").open(SEAL.seal(CLAIM), "alice", 999.0) == CLAIM


def test_a_gateway_without_the_secret_opens_nothing() -> None:
    for other in (StreamSeal("another secret"), StreamSeal(None)):
        with pytest.raises(UnknownStream):
            other.open(SEAL.seal(CLAIM), "alice", 0.0)


def test_a_changed_expired_or_borrowed_token_is_refused() -> None:
    token = SEAL.seal(CLAIM)
    for index in range(0, len(token), 7):
        changed = token[:index] + ("B" if token[index] != "B" else "C") + token[index + 1 :]
        with pytest.raises(UnknownStream):
            SEAL.open(changed, "alice", 0.0)
    with pytest.raises(UnknownStream, match="expired"):
        SEAL.open(token, "alice", 1000.0)
    with pytest.raises(UnknownStream, match="no such stream"):
        SEAL.open(token, "bob", 0.0)


def test_two_tokens_of_one_claim_differ() -> None:
    assert SEAL.seal(CLAIM) != SEAL.seal(CLAIM)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, 4]},
        {"sampling": Sampling(temperature=0.5)},
        {"stop": StopConditions(9)},
        {"stop": StopConditions(8, [5])},
        {"constraint": Constraint('start: "a"')},
    ],
)
def test_a_request_that_chooses_other_tokens_is_another(change: dict[str, Any]) -> None:
    request = TokenRequest("r", [1, 2, 3], Sampling(), StopConditions(8))
    assert request_digest(msgspec.structs.replace(request, **change)) != request_digest(request)
    same = msgspec.structs.replace(request, request_id="s", sampling=Sampling(seed=9))
    assert request_digest(same) == request_digest(request)

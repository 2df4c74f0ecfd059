"""What clients are told whose connections are refused, and what the log says of them."""

import json
import logging
from typing import Any

import pytest

from gateway.openai.refusals import BUSY, MALFORMED, PAUSE_SECONDS, TOO_LARGE, Refusal, RefusalLog


@pytest.mark.parametrize("refusal", [BUSY, MALFORMED, TOO_LARGE], ids=lambda refusal: refusal.why)
def test_a_refusal_is_a_whole_answer_with_an_error(refusal: Refusal) -> None:
    head, _, body = refusal.answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head and head.endswith(b"connection: close")
    assert json.loads(body)["error"]["message"]


def test_the_log_is_not_filled_by_refusals(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    log = RefusalLog(lambda: now)

    def logged(client: tuple[str, int] | None) -> list[dict[str, Any]]:
        caplog.clear()
        log.note("busy", client)
        return [vars(record)["fields"] for record in caplog.records]

    with caplog.at_level(logging.WARNING, "deepmesh.gateway"):
        assert logged(("::1", 80)) == [{"why": "busy", "client": "[::1]:80", "connections": 1}]
        now += PAUSE_SECONDS / 2
        assert [logged(("10.0.0.1", port)) for port in range(3)] == [[], [], []]
        now += PAUSE_SECONDS / 2
        assert logged(None) == [{"why": "busy", "client": "unknown", "connections": 4}]

import logging

import pytest

from worker.ranks.local_tcp import LocalTcpWarning


def test_each_sender_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    warning = LocalTcpWarning()
    with caplog.at_level(logging.WARNING, "deepmesh.worker"):
        for senders in ((), ("prefill-0",), ("prefill-0", "store"), ("store",)):
            warning.give(senders)
    assert [record.args for record in caplog.records] == [("prefill-0",), ("store",)]
    assert "share a PID namespace" in caplog.messages[0]

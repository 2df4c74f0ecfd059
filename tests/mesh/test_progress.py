import logging

import pytest

from mesh.progress import ProgressLog


def test_only_long_work_reports_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    progress = ProgressLog("loading weights", 10, lambda: now)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            now += 2.0
            progress.advance()
    [record] = caplog.records
    assert (record.getMessage(), record.__dict__["fields"]) == ("loading weights", {"done": "30%", "left_s": 14})

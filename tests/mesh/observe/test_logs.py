import json
import logging
from pathlib import Path

from mesh.observe.logs import JsonFormatter, LineFormatter
from mesh.observe.spans import request_id


def line(message: str, level: int = logging.INFO, **extra: object) -> str:
    record = logging.LogRecord("deepmesh", level, __file__, 1, message, None, None)
    record.__dict__.update(extra)
    return LineFormatter("scheduler").format(record)


def test_a_log_line_has_time_level_service_message_and_fields() -> None:
    time, rest = line("worker joined", fields={"worker": "decode-0"}).split(" ", 1)
    assert rest == "INFO  scheduler  worker joined worker=decode-0"
    assert [len(part) for part in time.split(":")] == [2, 2, 6]


def test_a_log_line_names_the_request_being_served() -> None:
    token = request_id.set("r-1")
    try:
        assert line("refused").endswith("refused request_id=r-1")
    finally:
        request_id.reset(token)


def test_a_log_line_of_an_exception_shows_its_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        text = line("failed", logging.ERROR, exc_info=(ValueError, error, error.__traceback__))
    assert text.splitlines()[-1] == "ValueError: broken"


def test_a_json_line_has_date_fields_and_exception() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError as error:
        record = logging.LogRecord(
            "deepmesh", logging.ERROR, __file__, 1, "failed", None, (ValueError, error, error.__traceback__)
        )
    record.__dict__["fields"] = {"worker": "decode-0", "path": Path("a")}
    record.created = 1_700_000_000.25
    text = JsonFormatter("scheduler").format(record)
    assert "\n" not in text
    fields = json.loads(text)
    assert fields.pop("exception").endswith("ValueError: broken\nin two")
    assert fields == {
        "worker": "decode-0",
        "path": "a",
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "ERROR",
        "service": "scheduler",
        "logger": "deepmesh",
        "message": "failed",
    }

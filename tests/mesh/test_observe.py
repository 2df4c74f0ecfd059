import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh.config import ObserveConfig
from mesh.errors import ConfigError
from mesh.metrics import SPAN_SECONDS
from mesh.observe import JsonFormatter, LineFormatter, configure, request_id, span
from mesh.trace_file import TraceFile
from mesh.tracing import SpanEvent


@contextmanager
def traced_to(path: Path, service: str = "decode") -> Iterator[None]:
    """Spans go to `path` inside the block, as `configure` would have it."""
    log, handler = logging.getLogger("deepmesh.trace"), TraceFile(service, path)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
        handler.close()


@contextmanager
def logged(level: int) -> Iterator[io.StringIO]:
    log, output = logging.getLogger("deepmesh.span"), io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(LineFormatter("decode"))
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield output
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def line(message: str, level: int = logging.INFO, **extra: object) -> str:
    record = logging.LogRecord("deepmesh", level, __file__, 1, message, None, None)
    record.__dict__.update(extra)
    return LineFormatter("scheduler").format(record)


def count_of(name: str) -> float:
    return next(
        sample.value
        for metric in SPAN_SECONDS.collect()
        for sample in metric.samples
        if sample.name == "deepmesh_span_seconds_count" and sample.labels == {"name": name}
    )


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


def test_a_span_counts_into_its_histogram() -> None:
    with span("test.counted"):
        pass
    with span("test.counted"):
        pass
    assert count_of("test.counted") == 2


def test_a_span_that_raises_is_counted_and_does_not_swallow() -> None:
    with pytest.raises(KeyError), span("test.raises"):
        raise KeyError
    assert count_of("test.raises") == 1


def test_a_span_logs_its_attributes_at_debug_level() -> None:
    with logged(logging.DEBUG) as output, span("kv.push", size_bytes=7):
        pass
    assert "DEBUG decode     kv.push size_bytes=7 ms=" in output.getvalue()


def test_a_span_says_nothing_at_info_level() -> None:
    with logged(logging.INFO) as output, span("kv.push"):
        pass
    assert output.getvalue() == ""


def test_a_closed_trace_is_json_with_one_event_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with traced_to(path):
        for number in range(1000):
            with span("step", number=number):
                pass
    events = json.loads(path.read_text())
    assert events[0]["args"] == {"name": "decode"}
    assert [event["args"]["number"] for event in events[1:]] == list(range(1000))
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events[1:])
    assert len(path.read_text().splitlines()) == 1 + len(events) + 1


def test_nested_spans_lie_inside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with traced_to(path), span("outer"), span("inner"):
        pass
    _, inner, outer = json.loads(path.read_text())
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_a_traced_span_carries_the_request_id(tmp_path: Path) -> None:
    path, token = tmp_path / "trace.json", request_id.set("r-2")
    try:
        with traced_to(path), span("place"):
            pass
    finally:
        request_id.reset(token)
    assert json.loads(path.read_text())[1]["args"] == {"request_id": "r-2"}


def test_an_unfinished_trace_is_valid_but_for_its_last_bracket(tmp_path: Path) -> None:
    handler = TraceFile("gateway", tmp_path / "trace.json")
    handler.emit(logging.makeLogRecord({"msg": "work", "event": SpanEvent(1000, 2000, {}, None, None, None)}))
    handler.flush()
    assert len(json.loads((tmp_path / "trace.json").read_text() + "]")) == 2
    handler.close()


def test_an_unwritable_trace_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observe.trace_file: cannot write .*missing/trace.json"):
        configure("gateway", ObserveConfig(trace_file=tmp_path / "missing" / "trace.json"))


def test_spans_that_do_not_fit_are_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with traced_to(Path("/dev/full")):
        for _ in range(1000):
            with span("step"):
                pass
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "spans are left out of the trace file"
    ]


# Writes spans until a part of them has no room, makes room, and writes some more.
GROWING = """
import logging, resource, signal, sys
from pathlib import Path
from mesh.observe import span
from mesh.trace_file import TraceFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
handler = TraceFile("decode", Path(sys.argv[1]))
log = logging.getLogger("deepmesh.trace")
log.addHandler(handler)
log.setLevel(logging.INFO)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit, name in ((20_000, "before"), (60_000, "without room"), (most, "after")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    for _ in range(50 if name == "before" else 1000):
        with span(name):
            pass
    handler.flush()
handler.close()
"""


def test_a_trace_file_is_whole_json_after_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    subprocess.run([sys.executable, "-c", GROWING, str(path)], check=True)
    names = [event["name"] for event in json.loads(path.read_text())]
    assert (names.count("before"), names.count("after")) == (50, 1000)
    assert names.count("without room") < 1000

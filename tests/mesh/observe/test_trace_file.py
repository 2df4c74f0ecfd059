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
from mesh.observe.logs import configure
from mesh.observe.spans import request_id, span
from mesh.observe.trace_file import TraceFile
from mesh.observe.tracing import SpanEvent


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
from mesh.observe.spans import span
from mesh.observe.trace_file import TraceFile

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

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mesh.observe.logs import LineFormatter
from mesh.observe.metrics import SPAN_SECONDS
from mesh.observe.spans import span


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


def count_of(name: str) -> float:
    return next(
        sample.value
        for metric in SPAN_SECONDS.collect()
        for sample in metric.samples
        if sample.name == "deepmesh_span_seconds_count" and sample.labels == {"name": name}
    )


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

import asyncio
from pathlib import Path

from gateway.processes.siblings import LENGTH_BYTES, Siblings, together

FIRST = b"""# HELP requests_total Requests
# TYPE requests_total counter
requests_total{model="a"} 3.0
# HELP seconds Time
# TYPE seconds histogram
seconds_bucket{le="1.0"} 2.0
seconds_bucket{le="+Inf"} 3.0
seconds_count 3.0
seconds_sum 4.5
"""
SECOND = b"""# HELP requests_total Requests
# TYPE requests_total counter
requests_total{model="a"} 5.0
"""


def test_every_series_names_its_process() -> None:
    text = together({0: FIRST, 1: SECOND}).decode()
    assert 'requests_total{model="a",process="0"} 3.0' in text
    assert 'requests_total{model="a",process="1"} 5.0' in text
    assert 'seconds_bucket{le="+Inf",process="0"} 3.0' in text
    assert 'seconds_sum{process="0"} 4.5' in text
    assert text.count("# TYPE requests_total counter") == 1


async def test_an_unfinished_message_of_a_process_is_dropped(tmp_path: Path) -> None:
    async def break_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(len(SECOND).to_bytes(LENGTH_BYTES) + SECOND[:-4])
        writer.close()

    async with await asyncio.start_unix_server(break_off, tmp_path / "1"), Siblings(tmp_path, 0, 2) as first:
        text = (await first.metrics()).decode()
    assert 'process="0"' in text and 'process="1"' not in text


async def test_a_process_tells_metrics_of_the_others(tmp_path: Path) -> None:
    async with Siblings(tmp_path, 0, 3) as first, Siblings(tmp_path, 1, 3):
        text = (await first.metrics()).decode()
    assert 'deepmesh_gateway_live_generations{process="0"}' in text
    assert 'deepmesh_gateway_live_generations{process="1"}' in text
    assert 'process="2"' not in text

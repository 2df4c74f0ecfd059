"""Makes Grafana's board: `make docs` writes deploy/observe/board.json, which compose provisions and others import."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BOARD = Path(__file__).with_name("board.json")
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


class Panel(NamedTuple):
    title: str
    # Grafana's name of the unit.
    unit: str
    # Pairs of a legend and the query that it names.
    queries: Sequence[tuple[str, str]]


def _quantiles(metric: str) -> list[tuple[str, str]]:
    rate = f"sum by (model, le) (rate({metric}_bucket[$__rate_interval]))"
    return [(f"{{{{model}}}} p{share * 100:g}", f"histogram_quantile({share}, {rate})") for share in (0.5, 0.99)]


def _rate(metric: str, *labels: str) -> str:
    return f"sum by ({', '.join(labels)}) (rate({metric}[$__rate_interval]))"


PANELS = (
    Panel("Time to first token", "s", _quantiles("deepmesh_gateway_time_to_first_token_seconds")),
    Panel("Time per output token", "s", _quantiles("deepmesh_gateway_time_per_output_token_seconds")),
    Panel("Gap between tokens", "s", _quantiles("deepmesh_gateway_inter_token_latency_seconds")),
    Panel("Output tokens", "short", [("{{model}}", _rate("deepmesh_gateway_output_tokens_total", "model"))]),
    Panel(
        "Generations by outcome",
        "reqps",
        [("{{outcome}}", _rate("deepmesh_gateway_requests_total", "outcome"))],
    ),
    Panel(
        "Refusals",
        "reqps",
        [("{{tenant}} {{reason}}", _rate("deepmesh_gateway_refusals_total", "tenant", "reason"))],
    ),
    Panel(
        "Workers, and those that the load asks for",
        "short",
        [
            ("{{role}}", "max by (role) (deepmesh_scheduler_workers)"),
            ("{{role}} wanted", "sum by (role) (max by (role, model) (deepmesh_scheduler_wanted_replicas))"),
        ],
    ),
    Panel(
        "Requests in the engines",
        "short",
        [
            ("{{instance}} running", "deepmesh_engine_running_requests > 0"),
            ("{{instance}} waiting", "deepmesh_engine_waiting_requests > 0"),
        ],
    ),
    Panel(
        "KV blocks in use",
        "percentunit",
        [("{{instance}}", "1 - deepmesh_engine_blocks_free / (deepmesh_engine_blocks > 0)")],
    ),
    Panel(
        "KV moved",
        "Bps",
        [("{{direction}} {{transport}}", _rate("deepmesh_transfer_bytes_total", "direction", "transport"))],
    ),
    Panel(
        "Prompt tokens found in caches",
        "percentunit",
        [
            (
                "{{model}}",
                f"{_rate('deepmesh_gateway_cached_tokens_total', 'model')}"
                f" / {_rate('deepmesh_gateway_prompt_tokens_total', 'model')}",
            )
        ],
    ),
    Panel(
        "KV stores in use",
        "percentunit",
        [("{{instance}}", "deepmesh_kvstore_blocks_used / (deepmesh_kvstore_blocks > 0)")],
    ),
)


def board() -> dict[str, Any]:
    """Grafana's model of the board."""
    return {
        "title": "deepmesh",
        "uid": "deepmesh",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    for number, panel in enumerate(PANELS):
        row, column = divmod(number, COLUMNS)
        yield {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
                for index, (legend, query) in enumerate(panel.queries)
            ],
        }


def text() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text(), encoding="utf-8")

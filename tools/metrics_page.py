"""`python -m tools.metrics_page`: makes docs/metrics.md from the definitions of the metrics.

Every service exports every metric; metrics of other services stay 0 or have no series.
"""

import sys
from collections.abc import Iterator

from prometheus_client.metrics import MetricWrapperBase

from mesh.observe import metrics
from mesh.observe.metric_aliases import ALIASES
from mesh.observe.quick_histogram import QuickHistogram

_HEAD = """<!-- Written by `make docs` from mesh/observe/metrics.py. -->

# Metrics

Every service serves Prometheus' `/metrics` on `server.metrics_port`; `deepmesh up` prints the ports. The second word of
a name is the service or the part that sets it; a service exports the others' as 0, or without a series. Where vLLM has
a figure that means the same, it is there under vLLM's name too, with `model_name` for `model`.

| name | type | labels | meaning | vLLM's name |
|---|---|---|---|---|
"""


def metrics_page() -> str:
    """The page as Markdown."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            [family] = metric.describe()
            kind, labels, meaning = family.type, metric._labelnames, family.documentation
        elif isinstance(metric, QuickHistogram):
            [family] = metric.collect()
            kind, labels, meaning = family.type, (metric.label,), metric.meaning
        else:
            continue
        suffix = "_total" if kind == "counter" else ""
        alias = f"`{ALIASES[family.name]}{suffix}`" if family.name in ALIASES else ""
        words = ", ".join(f"`{label}`" for label in labels)
        yield f"| `{family.name}{suffix}` | {kind} | {words} | {meaning} | {alias} |\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_page())

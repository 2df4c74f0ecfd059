"""What this process has counted."""

from prometheus_client import Counter, Gauge


def value_of(metric: Counter | Gauge) -> float:
    """The value of a metric without labels, or of one of a metric's children."""
    return float(metric._value.get())

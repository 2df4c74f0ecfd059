"""What a scrape has."""

import re

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from mesh.observe import metrics
from mesh.observe.metric_aliases import ALIASES, Aliases
from mesh.observe.quick_histogram import QuickHistogram


def test_counters_and_nothing_else_end_in_total() -> None:
    text = generate_latest().decode()
    kinds = dict(re.findall(r"^# TYPE (deepmesh_\w+) (\w+)$", text, re.MULTILINE))
    created = {name for name in kinds if name.endswith("_created")}
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        name for name in kinds.keys() - created if name.endswith("_total")
    }


def test_a_quick_histogram_is_like_any_other() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram("seconds", "What it is", "model", (0.01, 0.02), registry)
    plain = Histogram("seconds", "What it is", ["model"], buckets=(0.01, 0.02), registry=other)
    for value in (0.005, 0.02, 0.5):
        quick.labels("m").observe(value)
        plain.labels("m").observe(value)
    without_time = [line for line in generate_latest(other).decode().splitlines() if "_created" not in line]
    assert generate_latest(registry).decode().splitlines() == without_time


def test_buckets_resolve_a_time_per_token_of_20_ms() -> None:
    metrics.GATEWAY_TPOT_SECONDS.labels("buckets").observe(0.02)
    metrics.GATEWAY_ITL_SECONDS.labels("buckets").observe(0.02)
    text = generate_latest().decode()
    for name in ("time_per_output_token", "inter_token_latency"):
        series = re.findall(rf"^deepmesh_gateway_{name}_seconds_bucket{{(.*)}}", text, re.MULTILINE)
        bounds = [float(bound) for labels in series for bound in re.findall(r'le="([\d.]+)"', labels)]
        assert sum(0.015 < bound < 0.025 for bound in bounds) >= 4, name


def test_an_alias_repeats_the_series_under_vllms_names() -> None:
    registry = CollectorRegistry()
    counter = Counter("deepmesh_gateway_output_tokens_total", "Tokens generated", ["model"], registry=None)
    counter.labels("tiny").inc(7)
    Aliases([counter], registry)
    assert 'vllm:generation_tokens_total{model_name="tiny"} 7.0' in generate_latest(registry).decode()


def test_every_alias_has_its_original() -> None:
    names = {name for _, name in re.findall(r"^# (TYPE|HELP) (\S+)", generate_latest().decode(), re.MULTILINE)}
    for ours, alias in ALIASES.items():
        assert names & {ours, f"{ours}_total"}, ours
        assert names & {alias, f"{alias}_total"} or not alias.startswith("vllm:num")

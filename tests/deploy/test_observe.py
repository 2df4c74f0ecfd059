"""Prometheus' rules and Grafana's board: their names are ours, and promtool agrees with them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from deploy.observe import board
from mesh.observe import metrics

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
OBSERVE = DEPLOY / "observe"
RULES = OBSERVE / "rules.yaml"
# What a histogram is asked by.
SAMPLES = re.compile(r"_(bucket|sum|count)$")


def expressions_of_rules() -> list[str]:
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def expressions_of_board() -> list[str]:
    return [target["expr"] for panel in board.board()["panels"] for target in panel["targets"]]


def known_names() -> set[str]:
    """Names of all metrics, as Prometheus stores their series."""
    assert metrics.SPAN_SECONDS
    families = list(REGISTRY.collect())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


@pytest.mark.parametrize("expressions", [expressions_of_rules, expressions_of_board])
def test_rules_and_board_ask_for_metrics_that_there_are(expressions: Any) -> None:
    asked = {name for each in expressions() for name in re.findall(r"\bdeepmesh_\w+", each)}
    assert asked
    assert {SAMPLES.sub("", name) for name in asked} <= known_names()


def test_the_board_is_as_it_was_last_written() -> None:
    assert board.BOARD.read_text() == board.text(), "run `make docs`"


def test_compose_gives_grafana_board_and_source() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    volumes = [volume.removesuffix(":ro").split(":") for volume in services["grafana"]["volumes"]]
    mounted = {inside: DEPLOY / outside for outside, inside in volumes}
    (provider,) = yaml.safe_load((DEPLOY / "compose/grafana/dashboards/deepmesh.yaml").read_text())["providers"]
    shown = [outside for inside, outside in mounted.items() if inside.startswith(provider["options"]["path"] + "/")]
    assert shown == [board.BOARD]
    provisioned = mounted["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioned / "datasources/prometheus.yaml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(published.endswith(f":{port}") for published in services[host]["ports"])
    assert {panel["datasource"]["type"] for panel in board.board()["panels"]} == {source["type"]}


@pytest.mark.check("rules")
def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert promtool("test", "rules", str(OBSERVE / "rules_test.yaml")) == 0


@pytest.mark.check("rules")
def test_prometheus_reads_the_rules_and_the_boards_expressions(tmp_path: Path) -> None:
    assert promtool("check", "rules", str(RULES)) == 0
    asked = [expression.replace("$__rate_interval", "1m") for expression in expressions_of_board()]
    rules = [{"record": f"board:{number}", "expr": each} for number, each in enumerate(asked)]
    path = tmp_path / "board.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    assert promtool("check", "rules", str(path)) == 0


@pytest.mark.check("rules")
def test_every_alert_has_a_test() -> None:
    tests = yaml.safe_load((OBSERVE / "rules_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule} == fired


def promtool(*arguments: str) -> int:
    program = shutil.which("promtool")
    assert program, "install promtool: Debian's package prometheus has it"
    return subprocess.run([program, *arguments]).returncode

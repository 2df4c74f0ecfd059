"""The Helm chart, linted and rendered without a cluster."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/deepmesh"
R1 = ("values-r1-int4.yaml", "values-r1-fp8.yaml", "values-r1-1p1d.yaml")
SIZES = ("values.yaml", "values-laptop.yaml", "values-one-node.yaml", "values-4p8d.yaml", "values-two-hosts.yaml", *R1)
KUBERNETES = "1.37"
Resource = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("helm", path=DEPLOY / "check/node_modules/.bin") or shutil.which("helm")
    if binary is None:
        pytest.skip("needs helm: make deploy-check installs it")
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=60)


def lint(*arguments: str) -> subprocess.CompletedProcess[str]:
    return helm("lint", "--strict", str(CHART), *arguments)


@cache
def rendered(*arguments: str) -> list[Resource]:
    """The resources that `helm install mesh` would create with these arguments."""
    done = helm("template", "mesh", str(CHART), "--kube-version", f"{KUBERNETES}.0", *arguments)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_size(size: str) -> list[Resource]:
    return rendered("--values", str(CHART / size))


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    found = [each for each in resources if each["kind"] == kind and each["metadata"]["name"] == f"mesh-{name}"]
    assert len(found) == 1, f"{kind} {name}: {len(found)}"
    return found[0]


def pods(resources: list[Resource]) -> dict[str, Resource]:
    """Pod specifications by service."""
    found = {}
    for each in resources:
        if each["kind"] in ("Deployment", "StatefulSet"):
            template = each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        else:
            continue
        found[each["metadata"]["name"].removeprefix("mesh-")] = template["spec"]
    return found


def refused_custom_resources(resources: list[Resource]) -> str:
    """A line for each custom resource that the schema of its kind refuses."""
    if shutil.which("node") is None or not (DEPLOY / "check/node_modules/@kubernetes-models").is_dir():
        pytest.skip("needs node and @kubernetes-models: make deploy-check installs the latter")
    command = ["node", str(DEPLOY / "check/custom_resources.mjs")]
    done = subprocess.run(command, input=json.dumps(resources), capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr

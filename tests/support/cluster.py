"""A Kubernetes cluster that `kubectl` reaches, if there is one. Nothing of it is changed outside of `namespace`."""

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import yaml

from tests.support.chart import Resource


def kubectl(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """given: standard input."""
    return subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True, timeout=120)


def why_no_cluster() -> str | None:
    """None if there is a cluster."""
    if shutil.which("kubectl") is None:
        return "needs kubectl"
    asked = kubectl("get", "--raw", "/readyz", "--request-timeout=5s")
    return None if asked.returncode == 0 else f"needs a cluster: {asked.stderr.strip().splitlines()[-1]}"


@contextmanager
def namespace() -> Iterator[str]:
    """One of its own, which is deleted with all that is in it."""
    name = f"deepmesh-check-{uuid.uuid4().hex[:8]}"
    done = kubectl("create", "namespace", name)
    assert done.returncode == 0, done.stderr
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")


def missing_kinds(resources: Sequence[Resource]) -> set[str]:
    """API versions that the server does not have: custom resources whose controllers are not installed."""
    served = set(kubectl("api-versions").stdout.split())
    return {each["apiVersion"] for each in resources} - served


def refused(resources: Sequence[Resource], space: str) -> str:
    """What the server says against these resources, without creating them; unknown fields count."""
    options = ("--namespace", space, "--dry-run=server", "--validate=true")
    done = kubectl("apply", *options, "--filename", "-", given=yaml.safe_dump_all(resources))
    return "" if done.returncode == 0 else done.stderr


def names_of(kinds: str, space: str, release: str) -> list[str]:
    """The resources of a release. kinds: as in pods,secrets."""
    done = kubectl("get", kinds, "--namespace", space, "--selector", f"app.kubernetes.io/instance={release}", "-o=json")
    assert done.returncode == 0, done.stderr
    return [each["metadata"]["name"] for each in json.loads(done.stdout)["items"]]

"""The chart in the cluster that kubectl reaches (`make check-cluster`). Its pods need not run."""

import json
import warnings

import pytest

from tests.support.chart import CHART, SIZES, helm, of_size
from tests.support.cluster import kubectl, missing_kinds, names_of, namespace, refused, why_no_cluster
from tests.support.waiting import eventually

pytestmark = pytest.mark.check("cluster")
KINDS = (
    "pods,deployments,statefulsets,services,configmaps,secrets,poddisruptionbudgets,networkpolicies,serviceaccounts,"
    "roles,rolebindings"
)


@pytest.fixture(autouse=True, scope="module")
def cluster() -> None:
    why = why_no_cluster()
    if why is not None:
        pytest.skip(why)


@pytest.mark.parametrize("size", SIZES)
def test_each_size_is_what_the_server_takes(size: str) -> None:
    resources = of_size(size)
    missing = missing_kinds(resources)
    if missing:
        warnings.warn(f"{size}: the server has no {', '.join(sorted(missing))}", stacklevel=1)
    with namespace() as space:
        assert refused([each for each in resources if each["apiVersion"] not in missing], space) == ""


async def test_an_upgrade_keeps_secrets_and_an_uninstall_leaves_nothing() -> None:
    with namespace() as space:
        release("install", "mesh", space)
        made = secrets(space)
        assert set(made) == {"mesh-kv", "mesh-resume"}
        release("upgrade", "mesh", space, "--set", "decode.replicas=2")
        assert secrets(space) == made
        assert helm("uninstall", "mesh", "--namespace", space).returncode == 0
        await eventually(lambda: not names_of(KINDS, space, "mesh"), 120)


def test_schedulers_may_patch_pods_and_nothing_else() -> None:
    with namespace() as space:
        release("install", "mesh", space)
        rights = kubectl(
            "auth", "can-i", "--list", "--namespace", space, f"--as=system:serviceaccount:{space}:mesh-scheduler"
        ).stdout
        assert [line.split()[-1] for line in rights.splitlines() if line.startswith("pods ")] == ["[patch]"]
        for other in ("secrets", "deployments.apps", "configmaps", "pods/exec"):
            assert not [line for line in rights.splitlines() if line.startswith(f"{other} ")]


async def test_the_longest_name_of_a_release_gets_all_its_pods() -> None:
    name = 40 * "m"
    with namespace() as space:
        release("install", name, space)
        await eventually(lambda: len(names_of("pods", space, name)) == 8, 60)


def release(verb: str, name: str, space: str, *more: str) -> None:
    done = helm(verb, name, str(CHART), "--namespace", space, *more)
    assert done.returncode == 0, done.stderr


def secrets(space: str) -> dict[str, str]:
    """The secrets that the chart makes, by name."""
    done = kubectl("get", "secrets", "--namespace", space, "-o=json")
    found = {each["metadata"]["name"]: each.get("data", {}) for each in json.loads(done.stdout)["items"]}
    return {
        name: data["config.yaml"] for name, data in found.items() if name.startswith("mesh-") and "config.yaml" in data
    }

"""Kubernetes is told what the end of each worker would cost, over a real connection to a fake of its API."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from deepmesh.internal.v1 import workers_pb2

from mesh.errors import ConfigError
from scheduler.scaling.pod_costs import ANNOTATION, MOST, PodCosts, is_off
from scheduler.scaling.pods import Cluster, Pods
from tests.support.fake_cluster import NAMESPACE, FakeCluster, running_cluster
from tests.support.scheduler_server import ReportingWorker, identity_message, running_scheduler, scheduler_stub
from tests.support.waiting import eventually


@asynccontextmanager
async def told(fake: FakeCluster, costs: dict[str, float], directory: Path) -> AsyncIterator[tuple[PodCosts, Cluster]]:
    async with running_cluster(fake, directory) as cluster, Pods(cluster) as pods:
        yield PodCosts(lambda: costs, pods), cluster


async def test_the_cheapest_worker_goes_first(tmp_path: Path) -> None:
    fake, costs = FakeCluster("a", "b", "c"), {"a": 9000.0, "b": 2500.0, "c": 70_000.0}
    async with told(fake, costs, tmp_path) as (writer, _):
        await writer.update()
        assert fake.first_to_go() == "b"
        costs["b"] = 1e12
        await writer.update()
    assert fake.first_to_go() == "a"
    assert fake.pods["b"] == {ANNOTATION: str(MOST)}


async def test_a_cost_is_written_again_once_off_by_half(tmp_path: Path) -> None:
    fake, costs = FakeCluster("a", "b"), {"a": 10_000.0, "b": 400.0}
    async with told(fake, costs, tmp_path) as (writer, _):
        for cost in (10_000, 19_000, 6000, 20_001, 10_500, 10_000):
            costs["a"] = float(cost)
            await writer.update()
    # The first, the fourth (more than twice that) and the last (less than half of the fourth).
    assert fake.writes == ["a", "b", "a", "a"]
    assert fake.pods == {"a": {ANNOTATION: "10000"}, "b": {ANNOTATION: "400"}}


async def test_what_an_earlier_scheduler_wrote_does_not_stay(tmp_path: Path) -> None:
    fake = FakeCluster("idle", "busy")
    fake.pods["idle"] = {ANNOTATION: "90000"}
    async with told(fake, {"idle": 0.0, "busy": 5000.0}, tmp_path) as (writer, _):
        await writer.update()
    assert fake.first_to_go() == "idle"


@pytest.mark.parametrize(("written", "cost", "off"), [(0, 0, 0), (0, 900, 0), (0, 2001, 1), (5000, 0, 1), (1500, 0, 0)])
def test_costs_below_a_second_are_alike(written: int, cost: float, off: bool) -> None:
    assert is_off(written, cost) == off


async def test_a_worker_without_a_pod_keeps_nobody_from_theirs(tmp_path: Path) -> None:
    fake = FakeCluster("b")
    async with told(fake, {"a": 5000.0, "b": 5000.0}, tmp_path) as (writer, _):
        await writer.update()
        await writer.update()
    assert fake.writes == ["b"]


async def test_a_workers_id_leads_to_its_pod_and_nowhere_else(tmp_path: Path) -> None:
    fake, elsewhere = FakeCluster("pod"), FakeCluster("pod")
    (tmp_path / "elsewhere").mkdir()
    async with running_cluster(elsewhere, tmp_path / "elsewhere") as other:
        # Another host, another resource, another path, and the id of a worker that was given none.
        strange = [
            f"{other.url}/pod",
            f"../../{NAMESPACE}/pods/pod",
            "pod?x=1",
            "pod/status",
            "worker-1:8010",
            ":x",
            "..",
        ]
        async with told(fake, dict.fromkeys([*strange, "pod"], 5000.0), tmp_path) as (writer, _):
            await writer.update()
    assert fake.paths == [f"/api/v1/namespaces/{NAMESPACE}/pods/pod"] and not elsewhere.paths


async def test_a_new_pod_of_an_old_name_is_told(tmp_path: Path) -> None:
    fake, costs = FakeCluster("a"), {"a": 5000.0}
    async with told(fake, costs, tmp_path) as (writer, _):
        await writer.update()
        del costs["a"]
        await writer.update()
        fake.pods["a"], costs["a"] = {}, 5000.0
        await writer.update()
    assert fake.pods["a"] == {ANNOTATION: "5000"}


async def test_a_refusal_is_logged_once_and_so_is_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "scheduler.scaling.pod_costs")
    fake = FakeCluster("a")
    fake.allowed = False
    async with told(fake, {"a": 5000.0}, tmp_path) as (writer, _):
        await writer.update()
        await writer.update()
        (record,) = caplog.records
        assert "403" in record.fields["error"] and "'a'" in record.fields["error"]  # type: ignore[attr-defined]
        fake.allowed = True
        await writer.update()
    assert fake.pods["a"] == {ANNOTATION: "5000"}
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]


async def test_an_api_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCluster("a")
    async with running_cluster(fake, tmp_path) as cluster:
        pass
    async with Pods(cluster) as pods:
        await PodCosts(lambda: {"a": 5000.0}, pods).update()
    assert "does not answer" in caplog.records[-1].fields["error"]  # type: ignore[attr-defined]


async def test_a_renewed_token_is_used_at_once(tmp_path: Path) -> None:
    fake, costs = FakeCluster("a"), {"a": 5000.0}
    async with told(fake, costs, tmp_path) as (writer, cluster):
        await writer.update()
        fake.token = "second"
        (cluster.account / "token").write_text("second")
        costs["a"] = 50_000.0
        await writer.update()
    assert fake.writes == ["a", "a"]


async def test_a_scheduler_tells_kubernetes_which_of_its_workers_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCluster("busy", "idle")
    async with running_cluster(fake, tmp_path) as cluster:
        _, host, port = cluster.url.replace("//", "").split(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr("scheduler.scaling.pods.ACCOUNT", cluster.account)
        pods = {"deletion_costs": True, "period_seconds": 0.02}
        async with running_scheduler(pods=pods) as endpoint, scheduler_stub(endpoint) as stub:
            await ReportingWorker(stub, identity_message("idle")).start()
            load = workers_pb2.WorkerLoad(running_requests=7, free_blocks=900, decode_step_ms=10.0)
            await ReportingWorker(stub, identity_message("busy")).start(load=load)
            await eventually(lambda: set(fake.writes) == {"busy", "idle"})
    assert fake.first_to_go() == "idle"


async def test_a_scheduler_outside_kubernetes_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="this is no pod"):
        async with running_scheduler(pods={"deletion_costs": True}):
            pass
    with pytest.raises(ConfigError, match="has no service account"):
        Pods(Cluster("https://127.0.0.1:1", tmp_path))

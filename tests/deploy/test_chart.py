"""The chart, checked without a cluster. `make deploy-check` installs the tools and runs this."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode_svc.config import DecodeConfig
from gateway.config import GatewayConfig
from gateway.openai.openapi import OPERATIONS
from kvstore.config import KvStoreConfig
from mesh.config import Config
from mesh.config_values import load
from mesh.rpc.identity import Identity, Role
from mesh.tls import server_name
from prefill_svc.config import PrefillConfig
from scheduler.config import SchedulerConfig
from tests.support.chart import (
    CHART,
    KUBERNETES,
    R1,
    SIZES,
    Resource,
    helm,
    lint,
    named,
    of_size,
    pods,
    refused_custom_resources,
    rendered,
)
from worker.config import WorkerConfig
from worker.hosts.place import HostPlace, find_host

POD = "mesh-service-0"
pytestmark = pytest.mark.check("deploy")
CONFIGS: dict[str, type[Config]] = {
    "scheduler": SchedulerConfig,
    "gateway": GatewayConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "kvstore": KvStoreConfig,
}


def is_custom(resource: Resource) -> bool:
    group = resource["apiVersion"].partition("/")[0]
    kubernetes = group.endswith(".k8s.io") and "gateway" not in group and "x-k8s" not in group
    return "." in group and not kubernetes


@pytest.mark.parametrize("size", SIZES)
def test_each_size_is_linted_without_a_complaint(size: str) -> None:
    done = lint("--values", str(CHART / size))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("size", SIZES)
def test_each_size_is_what_kubernetes_takes(size: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="make deploy-check installs it")
    for resource in of_size(size):
        if not is_custom(resource):
            kubernetes.validate(resource, KUBERNETES, strict=True)


def test_custom_resources_are_what_their_controllers_take() -> None:
    custom = [each for each in of_size("values-4p8d.yaml") if is_custom(each)]
    assert {each["kind"] for each in custom} == {"ServiceMonitor", "HTTPRoute", "GRPCRoute", "ScaledObject"}
    assert refused_custom_resources(custom) == ""
    wrong = {**named(custom, "GRPCRoute", "gateway"), "spec": {"hostnames": 7}}
    assert refused_custom_resources([wrong]).startswith("GRPCRoute mesh-gateway: ")


def test_routes_attach_to_a_gateway_of_the_charts_own_class() -> None:
    values = ("routes.gateway.className=istio", "routes.gateway.tlsSecret=public", "routes.http.enabled=true")
    resources = rendered(*(part for value in (*values, "routes.grpc.enabled=true") for part in ("--set", value)))
    custom = [each for each in resources if is_custom(each)]
    assert refused_custom_resources(custom) == ""
    gateway = named(custom, "Gateway", "gateway")
    assert gateway["spec"]["gatewayClassName"] == "istio"
    [listener] = gateway["spec"]["listeners"]
    assert (listener["protocol"], listener["tls"]["certificateRefs"]) == ("HTTPS", [{"name": "public"}])
    for kind in ("HTTPRoute", "GRPCRoute"):
        assert named(custom, kind, "gateway")["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]


def test_every_path_of_the_gateways_api_is_routed() -> None:
    [rule] = named(of_size("values-4p8d.yaml"), "HTTPRoute", "gateway")["spec"]["rules"]
    [match] = rule["matches"]
    assert match["path"]["type"] == "PathPrefix"
    assert all(each.path.startswith(match["path"]["value"]) for each in OPERATIONS)


@pytest.mark.parametrize(
    ("value", "named_in_words"),
    [
        ("decode.replicas=-1", "decode.replicas"),
        ("decode.hosts=0", "decode.hosts"),
        ("gatway.replicas=3", "gatway"),
        ("image.pullPolicy=Sometimes", "image.pullPolicy"),
        ("decode.config.engine.max_requests=0", "decode.config.engine.max_requests"),
        ("decode.config.engine.max_request=8", "max_request"),
        ("gateway.config.server.port=80", "port"),
        ("gateway.config.resume.secret=a-secret-for-all-to-read", "secret"),
        ("decode.config.kv.secret=a-secret-for-all-to-read", "secret"),
        ("kvstore.config.memory_bytes=lots", "kvstore.config.memory_bytes"),
        ("prefill.resources.limits.memory=4GiB", "prefill.resources.limits.memory"),
        ("routes.http.enabled=true", "routes.http.parentRefs"),
        ("redis.url=localhost:6379", "redis.url"),
    ],
)
def test_a_wrong_value_fails_the_lint_by_its_name(value: str, named_in_words: str) -> None:
    done = lint("--set", value)
    assert done.returncode != 0
    assert named_in_words in done.stdout


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("redis.url=rediss://redis:6379", "another Redis than the chart's own: set redis.enabled=false"),
        ("serviceMesh=istio,security.issuer.name=ca", "leave security.issuer.name empty"),
        (
            "decode.autoscaling.enabled=true,decode.autoscaling.minReplicas=9",
            "decode.autoscaling.minReplicas=9 is more than maxReplicas=8",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: str, words: str) -> None:
    done = lint("--set", values)
    assert done.returncode != 0
    assert words in done.stdout


def test_a_release_may_have_a_name_of_forty_characters() -> None:
    assert helm("template", 40 * "m", str(CHART), "--kube-version", f"{KUBERNETES}.0").returncode == 0
    refused = helm("template", 41 * "m", str(CHART), "--kube-version", f"{KUBERNETES}.0")
    assert "has 41 characters: choose one of at most 40" in refused.stderr


def test_every_value_has_a_schema_and_a_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    document = json.loads((CHART / "values.schema.json").read_text())

    def missing(part: dict[str, Any], keys: dict[str, Any], path: str) -> list[str]:
        part = document["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        own = part.get("properties", {})
        found = [f"{path}{key}" for key in set(own) ^ set(keys)]
        for key in set(own) & set(keys) - {"config", "resources"}:
            if isinstance(keys[key], dict) and keys[key]:
                found += missing(own[key], keys[key], f"{path}{key}.")
        return found

    # Helm's own, for charts that contain this one.
    assert missing(document, values, "") == ["global"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("service", CONFIGS)
def test_each_service_starts_with_its_configuration(size: str, service: str, tmp_path: Path) -> None:
    config = started(of_size(size), service, tmp_path).model_dump()
    assert config["server"]["advertise"].startswith("10.0.0.7:")
    assert config["security"]["plaintext"]


@pytest.mark.parametrize("service", CONFIGS)
def test_each_service_listens_on_ipv6_if_it_is_told_to(service: str, tmp_path: Path) -> None:
    config = started(rendered("--set-string", "host=::"), service, tmp_path, pod_ip="fd00::7").model_dump()
    assert config["server"]["host"] == "::" and config["server"]["advertise"].startswith("[fd00::7]:")


def started(resources: list[Resource], service: str, directory: Path, pod_ip: str = "10.0.0.7") -> Config:
    """The configuration that a pod of this service would load."""
    path = directory / "config.yaml"
    path.write_text(named(resources, "ConfigMap", service)["data"]["config.yaml"])
    arguments = pods(resources)[service]["containers"][0]["args"]
    settings = [each.removeprefix("--set=") for each in arguments if each.startswith("--set=")]
    variables = {"POD_IP": pod_ip, "POD_NAME": POD, "LEADER_NAME": POD}
    for name, value in variables.items():
        settings = [each.replace(f"$({name})", value) for each in settings]
    return load(CONFIGS[service], path, settings)


@pytest.mark.parametrize("size", SIZES)
def test_pods_write_nowhere_and_only_schedulers_have_a_right(size: str) -> None:
    for service, pod in pods(of_size(size)).items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is (service == "scheduler")
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("service", CONFIGS)
def test_a_pod_is_given_the_time_that_its_requests_are(service: str) -> None:
    resources = of_size("values-4p8d.yaml")
    config = yaml.safe_load(named(resources, "ConfigMap", service)["data"]["config.yaml"])
    pod = pods(resources)[service]
    container = pod["containers"][0]
    pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] > pause + config["server"]["drain_seconds"]
    assert container["readinessProbe"]["grpc"] == {"port": config["server"]["health_port"], "service": "readiness"}
    assert container["livenessProbe"]["grpc"] == {"port": config["server"]["health_port"], "service": "liveness"}


def test_network_policies_let_only_callers_reach_decode_workers() -> None:
    policy = named(of_size("values.yaml"), "NetworkPolicy", "decode")
    allowed: dict[Any, set[str]] = {
        rule["ports"][0]["port"]: {
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for peer in rule["from"]
            if "podSelector" in peer
        }
        for rule in policy["spec"]["ingress"]
    }
    assert allowed == {"metrics": set(), "grpc": {"gateway"}, 32768: {"prefill", "kvstore"}}


def test_a_worker_asks_for_the_gpus_that_it_computes_on() -> None:
    resources = of_size("values-one-node.yaml")
    decode = pods(resources)["decode"]["containers"][0]
    assert decode["resources"]["limits"] == {"memory": "192Gi", "nvidia.com/gpu": 1}
    config = yaml.safe_load(named(resources, "ConfigMap", "decode")["data"]["config.yaml"])
    assert config["engine"]["device"] == "cuda"


@pytest.mark.parametrize(("size", "seconds"), [("values.yaml", 10), ("values-one-node.yaml", 120)])
def test_requests_wait_for_the_start_of_a_worker(size: str, seconds: float, tmp_path: Path) -> None:
    config = started(of_size(size), "gateway", tmp_path)
    assert isinstance(config, GatewayConfig) and config.dispatch.worker_seconds == seconds


@pytest.mark.parametrize("size", R1)
def test_r1_takes_the_eight_gpus_of_a_node(size: str, tmp_path: Path) -> None:
    resources, gpus = of_size(size), 0
    for role in ("prefill", "decode"):
        config = started(resources, role, tmp_path)
        assert isinstance(config, WorkerConfig)
        taken = pods(resources)[role]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)
        workers = named(resources, "Deployment", role)["spec"]["replicas"]
        assert not workers or config.engine.parallel.world == taken
        gpus += workers * taken
    assert gpus == 8


def test_a_worker_on_several_hosts_is_a_leader_worker_set(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="make deploy-check installs it")
    kubernetes = pytest.importorskip("kubernetes_validate", reason="make deploy-check installs it")
    resources = of_size("values-two-hosts.yaml")
    group = named(resources, "LeaderWorkerSet", "decode")
    schema = json.loads((CHART.parents[1] / "check/leaderworkerset.json").read_text())
    jsonschema.validate(group["spec"], schema)
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
    kubernetes.validate(pod, KUBERNETES, strict=True)
    container = template["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    config = started(resources, "decode", tmp_path)
    assert isinstance(config, DecodeConfig)
    parallel = config.engine.parallel
    assert (parallel.world, parallel.hosts) == (16, group["spec"]["leaderWorkerTemplate"]["size"])
    # What the controller sets in the second pod of the first group, whose leader is mesh-decode-0.
    variables = {"LWS_LEADER_ADDRESS": "mesh-decode-0.mesh-decode", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    place, _ = find_host(config, variables)
    assert place == HostPlace(1, "mesh-decode-0.mesh-decode:8010")
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["LEADER_NAME"] == "mesh-decode-$(GROUP_INDEX)"
    names = [each["name"] for each in container["env"]]
    assert names.index("GROUP_INDEX") < names.index("LEADER_NAME")


def test_hosts_of_a_worker_reach_each_other_on_every_port() -> None:
    rules = named(of_size("values-two-hosts.yaml"), "NetworkPolicy", "decode")["spec"]["ingress"]
    [open_rule] = [rule for rule in rules if "ports" not in rule]
    peers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in open_rule["from"]]
    assert peers == ["decode"]


def test_keda_scales_a_leader_worker_set() -> None:
    values = ("decode.hosts=2", "decode.autoscaling.enabled=true")
    resources = rendered(*(part for value in values for part in ("--set", value)))
    target = named(resources, "ScaledObject", "decode")["spec"]["scaleTargetRef"]
    group = named(resources, "LeaderWorkerSet", "decode")
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        group["apiVersion"],
        group["kind"],
        group["metadata"]["name"],
    )
    assert "replicas" not in group["spec"]


def test_keda_asks_every_scheduler_how_many_workers_are_wanted() -> None:
    resources = of_size("values-4p8d.yaml")
    scaled = named(resources, "ScaledObject", "decode")["spec"]
    assert "replicas" not in named(resources, "Deployment", "decode")["spec"]
    replicas = range(named(resources, "StatefulSet", "scheduler")["spec"]["replicas"])
    assert [trigger["metadata"] for trigger in scaled["triggers"]] == [
        {"scalerAddress": f"mesh-scheduler-{number}.mesh-schedulers.default.svc:8002", "role": "decode"}
        for number in replicas
    ]
    rules = named(resources, "NetworkPolicy", "scheduler")["spec"]["ingress"]
    peers = [peer for rule in rules for peer in rule["from"] if rule["ports"] == [{"port": "grpc", "protocol": "TCP"}]]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}} in peers


def test_schedulers_may_annotate_pods_and_nothing_else(tmp_path: Path) -> None:
    resources = rendered()
    account = pods(resources)["scheduler"]["serviceAccountName"]
    assert named(resources, "ServiceAccount", "scheduler")["metadata"]["name"] == account
    role = named(resources, "Role", "scheduler")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    binding = named(resources, "RoleBinding", "scheduler")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [(each["kind"], each["name"]) for each in binding["subjects"]] == [("ServiceAccount", account)]
    assert started(resources, "scheduler", tmp_path).model_dump()["pods"]["deletion_costs"]
    # The cost of a worker is written to the pod of its name.
    for role_of_workers in ("prefill", "decode"):
        assert started(resources, role_of_workers, tmp_path).model_dump()["worker_id"] == POD


def test_without_deletion_costs_no_pod_has_a_right(tmp_path: Path) -> None:
    resources = rendered("--set", "scheduler.podDeletionCost=false")
    assert not [each for each in resources if each["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    assert pods(resources)["scheduler"]["automountServiceAccountToken"] is False
    assert not started(resources, "scheduler", tmp_path).model_dump()["pods"]["deletion_costs"]


def test_a_secret_is_laid_over_the_configuration() -> None:
    pod = pods(rendered("--set", "gateway.configSecret=api-keys"))["gateway"]
    files = [each for each in pod["containers"][0]["args"] if each.startswith("--config=")]
    folders = ("deepmesh", "deepmesh-resume", "deepmesh-secret")
    assert files == [f"--config=/etc/{folder}/config.yaml" for folder in folders]
    assert {"name": "secret", "secret": {"secretName": "api-keys", "defaultMode": 0o440}} in pod["volumes"]


def test_gateways_share_the_secret_of_streams(tmp_path: Path) -> None:
    resources = rendered()
    secret = named(resources, "Secret", "resume")
    mounted = next(each["secret"] for each in pods(resources)["gateway"]["volumes"] if each["name"] == "resume")
    assert mounted["secretName"] == secret["metadata"]["name"]
    files = [tmp_path / "config.yaml", tmp_path / "resume.yaml"]
    files[0].write_text(named(resources, "ConfigMap", "gateway")["data"]["config.yaml"])
    files[1].write_text(base64.b64decode(secret["data"]["config.yaml"]).decode())
    config = load(GatewayConfig, files[0], overlays=files[1:])
    assert config.resume.secret is not None and len(config.resume.secret.get_secret_value()) == 48


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_share_a_secret_and_stores_do_not_have_it(role: str, tmp_path: Path) -> None:
    resources = rendered()
    secret = named(resources, "Secret", "kv")
    mounted = {
        name: [each["secret"]["secretName"] for each in pod.get("volumes", ()) if "secret" in each]
        for name, pod in pods(resources).items()
    }
    assert secret["metadata"]["name"] in mounted[role]
    assert secret["metadata"]["name"] not in mounted["kvstore"]
    files = [tmp_path / "config.yaml", tmp_path / "kv.yaml"]
    files[0].write_text(named(resources, "ConfigMap", role)["data"]["config.yaml"])
    files[1].write_text(base64.b64decode(secret["data"]["config.yaml"]).decode())
    config = load(CONFIGS[role], files[0], overlays=files[1:])
    assert isinstance(config, WorkerConfig)
    assert config.kv.secret is not None and len(config.kv.secret.get_secret_value()) == 48


def test_a_secret_of_ones_own_replaces_the_charts() -> None:
    resources = rendered("--set", "gateway.resumeSecret=ours", "--set", "security.kvSecret=workers")
    assert not [each for each in resources if each["kind"] == "Secret"]
    mounted = next(each["secret"] for each in pods(resources)["gateway"]["volumes"] if each["name"] == "resume")
    assert mounted["secretName"] == "ours"


@pytest.mark.parametrize("service", ["gateway", "prefill", "decode"])
def test_every_scheduler_is_called_by_its_pods_name(service: str, tmp_path: Path) -> None:
    resources = rendered()
    schedulers = named(resources, "StatefulSet", "scheduler")
    name, domain = schedulers["metadata"]["name"], schedulers["spec"]["serviceName"]
    assert [each for each in resources if each["kind"] == "Service" and each["metadata"]["name"] == domain]
    config = started(resources, service, tmp_path).model_dump()
    replicas = range(schedulers["spec"]["replicas"])
    assert config["scheduler"].split(",") == [f"{name}-{number}.{domain}:8002" for number in replicas]
    assert len(replicas) == 2


@pytest.mark.parametrize("service", CONFIGS)
def test_each_pod_gets_a_certificate_of_its_role(service: str, tmp_path: Path) -> None:
    resources = rendered("--set", "security.issuer.name=deepmesh-ca")
    config = started(resources, service, tmp_path).model_dump()
    volume = next(each for each in pods(resources)[service]["volumes"] if each["name"] == "certificate")
    mount = {each["name"]: each["mountPath"] for each in pods(resources)[service]["containers"][0]["volumeMounts"]}
    attributes = volume["csi"]["volumeAttributes"]
    assert server_name(Role(service)) in attributes["csi.cert-manager.io/dns-names"].split(",")
    uri = attributes["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", POD)
    assert Identity.parse(uri) == Identity(Role(service), POD)
    if service == "scheduler":
        # The name by which KEDA calls it.
        assert "${POD_NAME}.mesh-schedulers.default.svc" in attributes["csi.cert-manager.io/dns-names"].split(",")
    # A scheduler claims no name.
    claims = [key for key in ("gateway_id", "worker_id", "store_id") if key in config]
    assert [config[key] for key in claims] == [POD] * (service != "scheduler")
    assert {path.parent for path in config["security"]["tls"].values()} == {Path(mount["certificate"])}


@pytest.mark.parametrize(
    ("mesh", "annotation", "value"),
    [
        ("istio", "traffic.sidecar.istio.io/includeInboundPorts", "8010"),
        ("linkerd", "config.linkerd.io/skip-inbound-ports", "32768-60999,9000-9001"),
    ],
)
def test_a_sidecar_leaves_ucx_alone(mesh: str, annotation: str, value: str) -> None:
    deployment = named(rendered("--set", f"serviceMesh={mesh}"), "Deployment", "decode")
    assert deployment["spec"]["template"]["metadata"]["annotations"][annotation] == value


def test_istios_sidecar_encrypts_every_port_that_is_called() -> None:
    resources = rendered("--set", "serviceMesh=istio")
    called = [each["spec"]["ports"] for each in resources if each["kind"] == "Service"]
    inner = {str(port["port"]) for ports in called for port in ports if port["name"] in ("grpc", "redis")} - {"8001"}
    annotations = named(resources, "StatefulSet", "kvstore")["spec"]["template"]["metadata"]["annotations"]
    assert set(annotations["traffic.sidecar.istio.io/includeOutboundPorts"].split(",")) >= inner >= {"6379"}


def test_without_stores_there_is_neither_redis_nor_a_store() -> None:
    resources = rendered("--set", "kvstore.replicas=0")
    assert not {"kvstore", "redis"} & set(pods(resources))
    assert yaml.safe_load(named(resources, "ConfigMap", "decode")["data"]["config.yaml"])["stores"] == []


def test_a_store_with_a_disk_has_a_claim() -> None:
    values = ("kvstore.disk.size=600Gi", "kvstore.disk.storageClassName=nvme", "kvstore.config.disk.bytes=500000000000")
    resources = rendered(*(part for value in values for part in ("--set", value)))
    store = named(resources, "StatefulSet", "kvstore")["spec"]
    [claim] = store["volumeClaimTemplates"]
    assert claim["spec"]["resources"] == {"requests": {"storage": "600Gi"}}
    assert claim["spec"]["storageClassName"] == "nvme"
    mounts = {each["name"]: each["mountPath"] for each in store["template"]["spec"]["containers"][0]["volumeMounts"]}
    config = yaml.safe_load(named(resources, "ConfigMap", "kvstore")["data"]["config.yaml"])
    assert config["disk"] == {"path": mounts[claim["metadata"]["name"]], "bytes": 500_000_000_000}
    assert "volumeClaimTemplates" not in named(rendered(), "StatefulSet", "kvstore")["spec"]


def test_a_store_shows_redis_a_certificate_of_its_secret() -> None:
    values = ("redis.enabled=false", "redis.url=rediss://redis.example:6380/0", "redis.tlsSecret=redis-client")
    resources = rendered(*(part for value in values for part in ("--set", value)))
    pod = pods(resources)["kvstore"]
    [volume] = [each for each in pod["volumes"] if each.get("secret", {}).get("secretName") == "redis-client"]
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    config = yaml.safe_load(named(resources, "ConfigMap", "kvstore")["data"]["config.yaml"])
    index = KvStoreConfig.model_validate({"index": config["index"]}).index
    assert index.redis_url == values[1].partition("=")[2]
    assert index.redis_tls is not None
    assert {path.parent for path in index.redis_tls.model_dump().values()} == {Path(mounts[volume["name"]])}

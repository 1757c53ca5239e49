"""deploy/kubernetes as far as it can be checked without a cluster: schemas, commands, settings, probes, queries."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import redis
import typer
import yaml

from pagemill.__main__ import app
from pagemill.monitoring.metrics.catalogue import CATALOGUE
from pagemill.worker.config import WorkerConfig
from pagemill.worker.process import CLOSE_S
from pagemill.worker.status.queue_exporter import QueueExporter, QueueSet
from tests.conftest import ROOT, _free_port, server_binary
from tests.deploy.locking import IMAGES
from tests.monitoring.prometheus_server import SERIES, promtool
from tests.producer.gateway.serving import gateway
from tests.worker.harness import eventually, get, running_worker, worker_config

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("fixed", "autoscaled", "gpu")
VERSIONS = ("1.29.0", kubernetes_validate.latest_version())
OURS = ("worker", "gateway", "exporter")


@cache
def base() -> list[dict[str, Any]]:
    """Every object of the base, unchanged."""
    listed = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["resources"]
    return [made for name in listed for made in documents(KUBERNETES / "base" / name)]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    """An overlay as kustomize builds it."""
    return build(KUBERNETES / "overlays" / overlay)


def build(directory: Path) -> list[dict[str, Any]]:
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    elif kustomize := shutil.which("kustomize"):
        command = [kustomize, "build"]
    else:
        pytest.skip("neither kubectl nor kustomize is installed")
    made = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert not made.stderr, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))
    return found


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(name: str, objects: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    (only,) = pod(find(objects or base(), "Deployment", f"pagemill-{name}"))["containers"]
    made: dict[str, Any] = only
    return made


def workloads(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (o for o in objects if o["kind"] in ("Deployment", "StatefulSet"))


def environment(made: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "from-a-secret") for entry in made["env"]}


# Schemas


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_of_the_base_is_valid(version: str) -> None:
    assert len(base()) >= 11
    for made in base():
        kubernetes_validate.validate(made, version, strict=True)


def test_the_validation_would_notice() -> None:
    broken = {**find(base(), "Service", "pagemill-redis"), "spec": {"port": "redis"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_builds_valid_objects(overlay: str) -> None:
    objects = built(overlay)
    assert len({(o["kind"], o["metadata"]["name"]) for o in objects}) == len(objects)
    for made in objects:
        is_workers = made["metadata"]["name"] == "pagemill-worker"
        # ScaledObject is not part of Kubernetes: see below. The rest of an overlay is the base, as the last one shows.
        if made["kind"] != "ScaledObject" and (is_workers or overlay == OVERLAYS[-1]):
            kubernetes_validate.validate(made, VERSIONS[-1], strict=True)


def test_kustomizations_name_what_is_there() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        made = yaml.safe_load(path.read_text())
        named = [*made.get("resources", ()), *made.get("components", ())]
        named += [patch["path"] for patch in made.get("patches", ()) if "path" in patch]
        for name in named:
            assert (path.parent / name).exists(), f"{path}: {name}"
        files = {other.name for other in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert files <= set(named), f"{path} leaves out {files - set(named)}"


# The programs of the pods


@pytest.mark.parametrize("name", OURS)
def test_our_own_command_line_takes_the_arguments(name: str) -> None:
    group = typer.main.get_command(app)
    variants = [container(name)["args"]]
    if name == "worker":
        (patch,) = documents(KUBERNETES / "components" / "gpu" / "worker.yaml")
        variants.append(pod(patch)["containers"][0]["args"])
    for command, *arguments in variants:
        chosen = group.commands[command]  # type: ignore[attr-defined]
        context = chosen.make_context(command, list(arguments))  # rejects unknown keys
        assert context.info_name == name


def test_the_worker_is_gone_within_its_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(container("worker")).items():
        monkeypatch.setenv(name, value)
    config = WorkerConfig.load(model="echo")
    assert config.redis_url == "redis://pagemill-redis:6379/0"
    grace = pod(find(base(), "Deployment", "pagemill-worker"))["terminationGracePeriodSeconds"]
    assert config.drain_grace_s + CLOSE_S < config.shutdown_s < grace
    assert (config.http_host, config.http_port) == ("0.0.0.0", 9790)
    assert config.http_port == container("worker")["ports"][0]["containerPort"]
    known = set(WorkerConfig.model_fields) | {"redis_password", "cache_dir"}
    ours = {name for name in environment(container("worker")) if name.startswith("PAGEMILL_")}
    assert {name.removeprefix("PAGEMILL_").lower() for name in ours} <= known


def test_the_gateway_is_gone_within_its_grace_period() -> None:
    from pagemill.producer.gateway.config import GatewayConfig
    from pagemill.producer.gateway.gateway import CLOSE_S as GATEWAY_CLOSE_S

    workload = find(base(), "Deployment", "pagemill-gateway")
    pause = int(container("gateway")["lifecycle"]["preStop"]["exec"]["command"][1])
    # The pause counts: a pod's grace begins with its preStop hook.
    longest = pause + GatewayConfig().drain_s + GATEWAY_CLOSE_S
    grace = pod(workload)["terminationGracePeriodSeconds"]
    assert longest + 5 <= grace, "an interpreter's start and end take time as well"
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert f"`terminationGracePeriodSeconds: {grace}`" in page


@pytest.mark.parametrize("name", OURS)
def test_the_probes_ask_for_what_is_served(name: str, valkey_url: str, queue_name: str) -> None:
    made = container(name)
    probes = [made[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in made]
    assert len(probes) == (3 if name == "worker" else 2)
    paths = [probe["httpGet"]["path"] for probe in probes]
    assert {probe["httpGet"]["port"] for probe in probes} == {made["ports"][0]["name"]}
    port = made["ports"][0]["containerPort"]
    args = made["args"]
    if "--http-port" in args or "--port" in args:
        option = "--http-port" if "--http-port" in args else "--port"
        assert args[args.index(option) + 1] == str(port)
    match name:
        case "worker":
            with running_worker(worker_config(valkey_url, queue_name)) as worker:
                answers = [get(f"{worker.http_url}{path}")[0] for path in paths]
        case "gateway":
            with gateway(valkey_url, queue_name) as served:
                root = served.base_url.removesuffix("/v1")
                answers = [get(f"{root}{path}")[0] for path in paths]
        case _:
            exporter = QueueExporter(QueueSet(valkey_url, [queue_name]), "127.0.0.1", 0)
            answers = [get(f"{exporter.url}{path}")[0] for path in paths]
            exporter.close()
    assert answers == [200] * len(paths)


@pytest.mark.parametrize("name", OURS)
def test_prometheus_is_told_where_to_scrape(name: str) -> None:
    annotations = find(base(), "Deployment", f"pagemill-{name}")["spec"]["template"]["metadata"][
        "annotations"
    ]
    assert annotations["prometheus.io/scrape"] == "true"
    ports = {str(port["containerPort"]) for port in container(name)["ports"]}
    assert annotations["prometheus.io/port"] in ports


@pytest.mark.slow
def test_the_redis_command_keeps_what_is_queued_and_asks_for_a_password(tmp_path: Path) -> None:
    (made,) = pod(find(base(), "StatefulSet", "pagemill-redis"))["containers"]
    assert [volume["mountPath"] for volume in made["volumeMounts"]] == ["/data"]
    port = _free_port()
    (script,) = made["args"]
    script = script.replace("--port 6379", f"--port {port}").replace("--dir /data", f"--dir {tmp_path}")
    binaries = server_binary("valkey-server").parent
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [*made["command"], script],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}", "REDIS_PASSWORD": "a secret#1"},
    )
    client = redis.Redis(port=port, password="a secret#1", socket_timeout=10)
    try:

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

        eventually(answers, "the server")
        settings = client.config_get("*")
        assert settings["appendonly"] == "yes"
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["dir"] == str(tmp_path)
        limit = made["resources"]["limits"]["memory"]
        assert 0 < int(settings["maxmemory"]) * 2 <= int(limit.removesuffix("Gi")) * 2**30
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert client.info("server")["process_id"] == process.pid, "SIGTERM would reach a shell"
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        log.close()
    claims = find(base(), "StatefulSet", "pagemill-redis")["spec"]["volumeClaimTemplates"]
    assert [claim["metadata"]["name"] for claim in claims] == [made["volumeMounts"][0]["name"]]


# The pods' settings


def test_no_pod_has_more_rights_than_it_needs() -> None:
    for workload in workloads(base()):
        spec = pod(workload)
        assert spec["enableServiceLinks"] is False, "they would set PAGEMILL_GATEWAY_PORT, a setting of ours"
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for made in spec["containers"]:
            rights = made["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= made["resources"]["requests"].keys()
            assert "memory" in made["resources"]["limits"]
            assert not any("password" in str(value).lower() for value in made.get("args", ())) or (
                made["name"] == "redis"
            )


def test_the_worker_writes_only_where_it_can() -> None:
    spec = pod(find(base(), "Deployment", "pagemill-worker"))
    writable = {
        mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if not mount.get("readOnly")
    }
    for name, value in environment(spec["containers"][0]).items():
        if name == "HOME" or name.endswith("_CACHE_DIR"):
            assert any(value == path or value.startswith(f"{path}/") for path in writable), name
    user = re.search(r"--uid (\d+) pagemill", (ROOT / "Dockerfile").read_text())
    assert user is not None
    assert spec["securityContext"]["runAsUser"] == int(user[1])


@pytest.mark.parametrize("overlay", [None, *OVERLAYS])
def test_selectors_ports_secrets_and_volumes_meet(overlay: str | None) -> None:
    objects = base() if overlay is None else built(overlay)
    page = (ROOT / "docs" / "deploy.md").read_text()
    labels = {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"] for w in workloads(objects)}
    claims = {o["metadata"]["name"] for o in objects if o["kind"] == "PersistentVolumeClaim"}
    for workload in workloads(objects):
        assert (
            workload["spec"]["selector"]["matchLabels"].items()
            <= labels[workload["metadata"]["name"]].items()
        )
        for volume in pod(workload).get("volumes", ()):
            if "secret" in volume:
                assert f"create secret generic {volume['secret']['secretName']}" in page
            elif "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        for made in pod(workload)["containers"]:
            for entry in made.get("env", ()):
                if "valueFrom" in entry:
                    secret = entry["valueFrom"]["secretKeyRef"]
                    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in page
    for o in objects:
        if o["kind"] in ("Service", "PodDisruptionBudget"):
            selector = o["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            (target,) = (w for w in workloads(objects) if wanted <= labels[w["metadata"]["name"]].items())
            names = {port["name"] for made in pod(target)["containers"] for port in made["ports"]}
            assert {port["targetPort"] for port in o["spec"].get("ports", ())} <= names
    budgets = {o["metadata"]["name"] for o in objects if o["kind"] == "PodDisruptionBudget"}
    assert budgets == {"pagemill-worker", "pagemill-gateway"}


def test_the_dockerfile_builds_what_the_images_are_said_to_hold() -> None:
    note = re.search(r"LOCK=(\w+)", (KUBERNETES / "base" / "kustomization.yaml").read_text())
    assert note is not None
    assert set(IMAGES[note[1]]) == {"gateway", "exporter"}


def test_a_gpu_worker_asks_for_one() -> None:
    objects = built("gpu")
    resources = container("worker", objects)["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert container("worker", objects)["image"].endswith("-cuda")
    strategy = find(objects, "Deployment", "pagemill-worker")["spec"]["strategy"]
    assert strategy["rollingUpdate"]["maxSurge"] == 0
    assert "startupProbe" in container("worker", objects)


# Scaling


def scaled_object() -> dict[str, Any]:
    (made,) = documents(KUBERNETES / "components" / "autoscaling" / "scaledobject.yaml")
    return made


def test_keda_scales_the_worker_from_zero_and_takes_unknown_for_unknown() -> None:
    made = scaled_object()
    assert (made["apiVersion"], made["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = made["spec"]
    assert spec["scaleTargetRef"] == {"name": "pagemill-worker"}
    assert spec["minReplicaCount"] == 0 < spec["maxReplicaCount"]
    assert spec["fallback"]["replicas"] >= 1
    assert [trigger["name"] for trigger in spec["triggers"]] == ["depth", "oldest-age"]
    for trigger in spec["triggers"]:
        assert trigger.keys() == {"type", "name", "metricType", "metadata"}
        # A fallback works only for average values.
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        metadata = trigger["metadata"]
        assert metadata.keys() == {
            "serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues",
        }  # fmt: skip
        assert all(isinstance(value, str) for value in metadata.values()), "KEDA takes strings only"
        assert float(metadata["threshold"]) > 0 == float(metadata["activationThreshold"])
        assert metadata["ignoreNullValues"] == "false"


def test_kedas_queries_are_about_metrics_that_exist(tmp_path: Path) -> None:
    labels = {metric.prefix + metric.name: set(metric.labels) for metric in CATALOGUE}
    queue = environment(container("worker"))["PAGEMILL_QUEUE"]
    queries = [trigger["metadata"]["query"] for trigger in scaled_object()["spec"]["triggers"]]
    for query in queries:
        found = SERIES.findall(query)
        assert found, query
        for name, matchers in found:
            assert name in labels, name
            assert set(re.findall(r"(\w+)=", matchers)) <= labels[name]
            assert f'queue="{queue}"' in matchers
        for grouping in re.findall(r"by \(([\w, ]+)\)", query):
            assert set(grouping.split(", ")) <= set.union(*(labels[name] for name, _ in found))
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    checked = promtool("check", "rules", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_one_party_says_how_many_workers_there_are(overlay: str) -> None:
    objects = built(overlay)
    scaled = [o for o in objects if o["kind"] == "ScaledObject"]
    replicas = find(objects, "Deployment", "pagemill-worker")["spec"].get("replicas")
    assert (replicas is None) == bool(scaled)
    assert replicas == 2 if overlay == "fixed" else scaled


# The Prometheus operator: no Kubernetes schema has its types


def monitored(tmp_path: Path) -> list[dict[str, Any]]:
    """The fixed overlay with the monitoring component."""
    component = KUBERNETES / "components" / "monitoring"
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "overlays" / "fixed", tmp_path.resolve())],
        "components": [os.path.relpath(component, tmp_path.resolve())],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return build(tmp_path)


def test_the_rule_for_the_operator_holds_every_rule(tmp_path: Path) -> None:
    rule = find(monitored(tmp_path), "PrometheusRule", "pagemill")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    groups = rule["spec"]["groups"]
    files = [ROOT / "monitoring" / "prometheus" / "recording_rules.yml"]
    files += sorted((ROOT / "monitoring" / "prometheus" / "alerts").glob("*.yml"))
    expected = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert groups == expected, "run python deploy/prometheus_rule.py"
    script = runpy.run_path(str(ROOT / "deploy" / "prometheus_rule.py"))
    assert script["TARGET"].read_text() == script["render"]()
    assert all(group.keys() <= {"name", "interval", "rules"} for group in groups)
    alone = tmp_path / "alone"
    alone.write_text(yaml.safe_dump(rule["spec"]))
    checked = promtool("check", "rules", alone)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_pod_is_monitored_under_a_job_that_the_alerts_know(tmp_path: Path) -> None:
    objects = monitored(tmp_path)
    jobs = {}
    for name in OURS:
        monitor = find(objects, "PodMonitor", f"pagemill-{name}")
        deployment = find(objects, "Deployment", f"pagemill-{name}")
        assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in container(name, objects)["ports"]}
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        jobs[name] = relabeling["replacement"]
    scraped = yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert {jobs["worker"], jobs["gateway"]} <= {config["job_name"] for config in scraped}
    assert [name for name in OURS if re.fullmatch("pagemill.*worker.*", jobs[name])] == ["worker"]
    assert all(re.fullmatch("pagemill.*", job) for job in jobs.values())

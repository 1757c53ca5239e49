"""Dockerfile and docker-compose.yml, as far as they can be checked without a container engine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pagemill.__main__ import app
from pagemill.cli.processes.gateway import DEFAULT_PORT
from pagemill.engine.models.packaged import PACKAGED_MODEL
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.gateway import CLOSE_S
from pagemill.worker.worker import Worker
from tests.conftest import ROOT
from tests.deploy.locking import IMAGES
from tests.monitoring.prometheus_server import promtool
from tests.worker.harness import eventually, get, worker_config

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def test_everything_that_is_copied_or_mounted_exists() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists(), source
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], source


def test_the_image_holds_every_package() -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    assert copied == {"pagemill", *(path.name for path in (ROOT / "pagemill").iterdir() if path.is_symlink())}
    assert DOCKERFILE.rindex("COPY pagemill") > DOCKERFILE.rindex("COPY monitoring")


def test_the_locks_that_are_installed_exist_and_hold_the_extras() -> None:
    images = {"worker": re.findall(r"ARG LOCK=(\w+)", DOCKERFILE)[0]}
    for name, service in COMPOSE["services"].items():
        if isinstance(build := service.get("build"), dict) and "LOCK" in build["args"]:
            images[name] = build["args"]["LOCK"]
    assert images.keys() == {"worker", "gateway", "exporter"}
    for extra, image in images.items():
        assert extra in IMAGES[image]
        assert extra in PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", ["worker", "gateway", "exporter"])
def test_our_command_line_takes_the_commands(name: str) -> None:
    command, *arguments = map(interpolated, COMPOSE["services"][name]["command"])
    chosen = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    assert chosen.make_context(command, arguments).info_name == name


def interpolated(text: str) -> str:
    """With the default of each variable."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


SERVICE_KEYS = {
    "build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "ports", "read_only",
    "restart", "security_opt", "stop_grace_period", "tmpfs", "user", "volumes",
}  # fmt: skip


def test_the_file_has_the_shape_that_compose_reads() -> None:
    assert COMPOSE.keys() == {"x-confined", "services", "volumes"}
    for name, service in COMPOSE["services"].items():
        assert service.keys() <= SERVICE_KEYS, name
        assert ("image" in service) != ("build" in service), name
        assert all(isinstance(word, str) for word in service.get("command", ())), name
        assert all(isinstance(value, str) for value in service.get("environment", {}).values()), name
        assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys(), name
        published = [port.split(":") for port in service.get("ports", ())]
        assert all(len(parts) == 3 and parts[0] == "127.0.0.1" for parts in published), name


def test_every_service_restarts() -> None:
    assert {service.get("restart") for service in COMPOSE["services"].values()} == {"unless-stopped"}


def test_the_worker_has_the_packaged_model_and_a_page_that_is_reached() -> None:
    worker = COMPOSE["services"]["worker"]
    assert interpolated(worker["command"][2]) == PACKAGED_MODEL
    assert worker["build"]["args"] == {"DEMO": "yes"}
    (name,) = re.findall(r"^(\S+)==", (ROOT / "deploy/requirements/demo.txt").read_text(), re.MULTILINE)
    assert name in " ".join(PROJECT["project"]["optional-dependencies"]["demo"])
    assert {"gguf", "accelerate"} <= set(
        re.findall(r"^(\S+)==", (ROOT / "deploy/requirements/worker.txt").read_text(), re.MULTILINE)
    ), "what transformers needs to read it"
    assert worker["ports"] == ["127.0.0.1:9790:9790"]
    assert "--live-page" in worker["command"]


def is_healthy(check: list[str], port: str) -> bool:
    kind, program, *arguments = check
    assert (kind, program) == ("CMD", "python")
    arguments = [word.replace("127.0.0.1:9790", f"127.0.0.1:{port}") for word in arguments]
    return subprocess.run([sys.executable, *arguments], capture_output=True, check=False).returncode == 0


def test_the_worker_is_not_healthy_while_it_loads(valkey_url: str, queue_name: str) -> None:
    check = COMPOSE["services"]["worker"]["healthcheck"]["test"]
    worker = Worker(worker_config(valkey_url, queue_name), valkey_url)
    worker.start()
    try:
        port = str(worker.http_url).rstrip("/").rpartition(":")[2]
        assert get(f"{worker.http_url}/readyz")[0] == 503
        assert not is_healthy(check, port)
        assert worker.wait_ready(60)
        eventually(lambda: is_healthy(check, port), "its health")
    finally:
        worker.abandon()
        worker.close()


def test_the_settings_are_read_by_somebody() -> None:
    sources = "".join(
        path.read_text() for part in ("producer", "worker", "engine") for path in (ROOT / part).rglob("*.py")
    )
    names = re.findall(r"^\s*(?:ENV )?.*?(PAGEMILL_\w+)=", DOCKERFILE, re.MULTILINE)
    names += [
        n for s in COMPOSE["services"].values() for n in s.get("environment", {}) if n.startswith("PAGEMILL_")
    ]
    provisioned = "".join(
        path.read_text() for path in (ROOT / "monitoring/grafana/provisioning").rglob("*.yml")
    )
    for name in set(names):
        setting = name.removeprefix("PAGEMILL_").lower()
        assert name in sources + provisioned or re.search(rf"\b{setting}\b", sources), name


def test_prometheus_reads_the_rules_that_are_mounted_and_the_ports_that_are_served() -> None:
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    mounted = [v.split(":")[1] for v in COMPOSE["services"]["prometheus"]["volumes"]]
    for pattern in prometheus["rule_files"]:
        assert f"/etc/prometheus/{pattern.partition('/')[0]}" in mounted
    jobs = {config["job_name"]: config for config in prometheus["scrape_configs"]}
    services = COMPOSE["services"]
    # Workers and gateways by name, so that `--scale` is included.
    ports = {
        "worker": services["worker"]["environment"]["PAGEMILL_HTTP_PORT"],
        "gateway": services["gateway"]["ports"][0].rpartition(":")[2],
    }
    for name, port in ports.items():
        (found,) = jobs.pop(f"pagemill-{name}s")["dns_sd_configs"]
        assert (found["names"], found["type"], str(found["port"])) == ([name], "A", port)
    assert "--port" not in services["gateway"]["command"]
    assert ports["gateway"] == str(DEFAULT_PORT)
    exporter = jobs.pop("pagemill-exporter")
    assert exporter["static_configs"][0]["targets"] == [f"exporter:{services['exporter']['command'][-1]}"]
    assert not jobs


def test_prometheus_takes_its_configuration_and_rules_as_they_are_mounted(tmp_path: Path) -> None:
    for volume in COMPOSE["services"]["prometheus"]["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("./"):
            mounted = tmp_path / target.removeprefix("/etc/prometheus/")
            mounted.parent.mkdir(exist_ok=True)
            mounted.symlink_to((ROOT / source).resolve())
    checked = promtool("check", "config", tmp_path / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout


def test_redis_keeps_what_is_queued() -> None:
    command = COMPOSE["services"]["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--appendonly"] == "yes"
    assert re.fullmatch(r"\d+gb", options["--maxmemory"])


@pytest.mark.parametrize(
    ("reply", "code"), [("PONG", 0), ("LOADING Redis is loading the dataset in memory", 1)]
)
def test_a_redis_that_loads_its_file_is_not_healthy(tmp_path: Path, reply: str, code: int) -> None:
    kind, command = COMPOSE["services"]["redis"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    client = tmp_path / "valkey-cli"
    client.write_text(f"#!/bin/sh\necho '{reply}'\n")
    client.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["sh", "-c", interpolated(command)], env=environment, check=False)
    assert ran.returncode == code


def test_what_is_stopped_has_time_to_drain() -> None:
    seconds = {
        name: int(COMPOSE["services"][name]["stop_grace_period"].rstrip("s"))
        for name in ("worker", "gateway")
    }
    assert seconds["worker"] >= 30
    assert seconds["gateway"] >= GatewayConfig().drain_s + CLOSE_S + 5

"""Dockerfile and docker-compose.yml, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pagemill.__main__ import app
from pagemill.cli.processes.gateway import DEFAULT_PORT
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.gateway import CLOSE_S
from tests.conftest import ROOT
from tests.deploy.locking import IMAGES
from tests.monitoring.prometheus_server import promtool

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
        if isinstance(build := service.get("build"), dict):
            images[name] = build["args"]["LOCK"]
    assert images.keys() == {"worker", "gateway", "exporter"}
    for extra, image in images.items():
        assert extra in IMAGES[image]
        assert extra in PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", ["worker", "gateway", "exporter"])
def test_the_commands_are_ones_that_pagemill_has(name: str) -> None:
    command, *arguments = COMPOSE["services"][name]["command"]
    options = [word for word in arguments if word.startswith("--")]
    listed = CliRunner().invoke(app, [command, "--help"], terminal_width=200).output
    assert all(re.search(rf"{option}\b", listed) for option in options), listed


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
    # Workers and gateways by name, so that `--scale` is seen.
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


def test_what_is_stopped_has_time_to_drain() -> None:
    seconds = {
        name: int(COMPOSE["services"][name]["stop_grace_period"].rstrip("s"))
        for name in ("worker", "gateway")
    }
    assert seconds["worker"] >= 30
    assert seconds["gateway"] >= GatewayConfig().drain_s + CLOSE_S + 5

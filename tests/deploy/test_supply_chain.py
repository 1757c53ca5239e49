"""The images' sources, their writable paths, and the bill of materials."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT
from tests.deploy.locking import IMAGES, pins, requirements
from tests.worker.harness import PATIENCE_S, QueueClient

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@cache
def locked(image: str) -> dict[str, tuple[str, str]]:
    """Name: version and hash."""
    text = (ROOT / "deploy" / "requirements" / f"{image}.txt").read_text()
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    found = re.findall(r"^([a-z0-9.-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})\n", lines, re.MULTILINE)
    assert len(found) == lines.count("\n") / 2, "there is nothing else in it: no index, no host, no option"
    return {canonicalize_name(name): (version, digest) for name, version, digest in found}


# Locks: `make lock` writes them


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_is_of_the_versions_that_are_tested(image: str) -> None:
    constraints = pins((ROOT / "constraints.txt").read_text())
    tested = {canonicalize_name(name): version for name, version in constraints.items()}
    stale = {
        name: (version, tested.get(name))
        for name, (version, _) in locked(image).items()
        if version.partition("+")[0] != tested.get(name)
    }
    assert not stale, f"run `make lock`: {stale}"


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_is_complete(image: str) -> None:
    """Every requirement, and its own requirements: pip does not resolve any when the image is built."""
    missing: set[str] = set()
    seen: set[str] = set()
    todo = [Requirement(text) for text in requirements(IMAGES[image])]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not any(
            wanted.marker.evaluate({"extra": e}) for e in ("", *wanted.extras)
        ):
            continue
        if name not in locked(image):
            missing.add(name)
        elif (key := f"{name}[{','.join(sorted(wanted.extras))}]") not in seen:
            seen.add(key)
            todo += [Requirement(text) for text in of(name) if belongs(Requirement(text), wanted.extras)]
    assert not missing, f"run `make lock`: {missing}"


def of(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def belongs(needed: Requirement, extras: set[str]) -> bool:
    return needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def test_the_image_is_installed_from_its_lock_alone() -> None:
    installs = re.findall(r"pip install(.*)", DOCKERFILE.replace("\\\n", " "))
    assert len(installs) == 2
    assert "--require-hashes --no-deps" in installs[0]
    assert "-r deploy/requirements/${LOCK}.txt" in installs[0]
    assert "--no-deps --no-index --no-build-isolation" in installs[1], "what builds it is in the lock too"
    assert {"setuptools"} <= locked("worker").keys() & locked("light").keys()
    assert re.search(r"^ARG BASE=python:3\.\d+-slim", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${BASE}"}


@pytest.mark.slow
def test_the_bill_of_materials(tmp_path: Path) -> None:
    if find_spec("cyclonedx_py") is None:
        pytest.skip("cyclonedx-bom is not installed; it is in the dev extra")
    recipe = (ROOT / "Makefile").read_text().partition("\nsbom:")[2].partition("\nclean:")[0]
    options = re.search(r"-m cyclonedx_py (.*?) -o ", recipe.replace("\\\n", " "), re.DOTALL)
    assert options is not None
    for image in IMAGES:
        words = shlex.split(options[1].replace("$$lock", f"deploy/requirements/{image}.txt"))
        made = tmp_path / f"{image}.json"
        command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", *words, "-o", str(made)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
        document = json.loads(made.read_text())
        assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "pagemill")
        listed = {
            canonicalize_name(part["name"]): (
                part["version"],
                part["externalReferences"][0]["hashes"][0]["content"],
            )
            for part in document["components"]
        }
        assert listed == locked(image)


# Confinement


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_service_is_confined(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]


def test_the_image_has_a_user_by_number_and_writes_where_volumes_are() -> None:
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)
    mounted = COMPOSE["services"]["worker"]["volumes"]
    writable = [volume.split(":")[1] for volume in mounted if not volume.endswith(":ro")]
    assert writable == ["/var/cache/pagemill"]
    environment = written(DOCKERFILE)
    assert {"HOME", "PAGEMILL_CACHE_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"} <= environment.keys()
    assert all(value.startswith(writable[0]) for value in environment.values())


def written(dockerfile: str) -> dict[str, str]:
    """The image's variables that name writable paths."""
    return dict(re.findall(r"\b(HOME|\w+_CACHE_DIR)=(\S+)", dockerfile))


_KERNELS = """
import pagemill.kernels.gpu
from pagemill.kernels.cpu.jit import compiler
print(compiler.numba.config.CACHE_DIR)
"""


@pytest.fixture
def confined() -> list[str]:
    """A command prefix: a user without rights, a read-only root, and only the declared volumes."""
    mounts = "mount -t tmpfs none /var/cache && mkdir /var/cache/pagemill && chown 10001 /var/cache/pagemill"
    mounts += " && mount -t tmpfs none /tmp && chmod 1777 /tmp && mount -o remount,bind,ro /"
    # A container's user does not need the right to read root's files: in the image all users can read them.
    user = (
        "setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --inh-caps -all,+dac_read_search"
    )
    user += " --ambient-caps -all,+dac_read_search --bounding-set -all,+dac_read_search"
    prefix = [
        "unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} && exec {user} "$@"', "sh",
    ]  # fmt: skip
    if (
        not all(map(shutil.which, ("unshare", "setpriv")))
        or subprocess.run([*prefix, "true"], check=False).returncode
    ):
        pytest.skip("this user may not mount, so there is no read-only root to be had")
    hidden = [path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")]
    if hidden:
        pytest.skip(f"{hidden[0]} lies below /tmp, which is a volume of the container's")
    return prefix


def image_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "XDG_"))}
    return kept | written(DOCKERFILE) | {"PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_a_worker_runs_on_a_read_only_root(confined: list[str], client: QueueClient, tmp_path: Path) -> None:
    can = "touch /tmp/probe /var/cache/pagemill/probe"
    probe = [*confined, "sh", "-c", f"! touch /probe && ! touch /root/probe && {can}"]
    subprocess.run(probe, check=True, capture_output=True)
    words = [
        "worker", "--model", "echo", "--redis-url", client.url, "--queue", client.queue, "--http-port", "0",
    ]  # fmt: skip
    log_path = tmp_path / "log"
    with log_path.open("wb") as log:
        command = [*confined, sys.executable, "-m", "pagemill", *words]
        worker = subprocess.Popen(command, cwd=ROOT, env=image_environment(), stdout=log, stderr=log)
    try:
        (outcome,) = client.wait(client.submit({"prompt": "hello", "max_tokens": 5}))
        assert outcome.state == "succeeded", log_path.read_text()
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_S) == 0, log_path.read_text()
    assert "can't be" not in log_path.read_text()


@pytest.mark.slow
def test_kernels_are_kept_on_the_volume(confined: list[str]) -> None:
    ran = subprocess.run(
        [*confined, sys.executable, "-c", _KERNELS], cwd=ROOT, env=image_environment(),
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("/var/cache/pagemill/numba/kernels-")
    assert "can't be kept" not in ran.stderr

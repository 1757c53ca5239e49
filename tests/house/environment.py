"""A virtual environment with an installed wheel, separate from the environment that runs the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tests.conftest import ROOT
from tests.worker.harness import PATIENCE_S, eventually


class Environment:
    """A new virtual environment without pip, and the working directory of the commands run in it."""

    def __init__(self, directory: Path, folder: Path, url: str) -> None:
        venv.create(directory)
        self.folder = folder
        self.binaries = directory / "bin"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PAGEMILL_", "PYTHON"))
        }
        self.variables = kept | {"PAGEMILL_REDIS_URL": url, "OMP_NUM_THREADS": "1"}

    def pip(self, *arguments: str) -> str:
        """Run this interpreter's pip on the environment. Returns its output and fails if pip does."""
        return self._succeed([sys.executable, "-m", "pip", "--python", self.binaries / "python", *arguments])

    def install(self, *requirements: str) -> None:
        """Install requirements in the versions of constraints.txt, with the build of torch that the tests use."""
        constraints = self.folder / "constraints.txt"
        constraints.write_text(pinned())
        self.pip("install", "-q", "--no-compile", "-c", str(constraints), *requirements)

    def start(self, *command: str, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as file:
            return subprocess.Popen(
                [self.binaries / command[0], *command[1:]],
                cwd=self.folder, env=self.variables, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

    def run(self, *command: str) -> str:
        """Return the command's standard output; fails if its exit code is not 0."""
        return self._succeed([self.binaries / command[0], *command[1:]])

    def fail(self, *command: str) -> str:
        """Return both outputs of a command; fails if its exit code is 0."""
        done = self._run([self.binaries / command[0], *command[1:]])
        assert done.returncode != 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def python(self, code: str, *arguments: str) -> str:
        """Run a script in the working directory, which Python searches first for modules."""
        self.write_module("script", code)
        return self.run("python", "-m", "script", *arguments)

    def write_module(self, name: str, code: str) -> None:
        """Write a module of the working directory."""
        (self.folder / f"{name}.py").write_text(code)

    @contextmanager
    def service(self, *command: str, until: str) -> Iterator[Path]:
        """Run a command in the background, from the time its log contains `until`; yields the log's path."""
        log = self.folder / f"{command[-1].replace('/', '_')}.log"
        process = self.start(*command, log=log.name)
        try:
            eventually(lambda: process.poll() is not None or until in log.read_text(), f"{command}")
            assert process.poll() is None, log.read_text()
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)

    def _succeed(self, command: list[str | Path]) -> str:
        done = self._run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _run(self, command: list[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=600, check=False
        )  # fmt: skip


def pinned() -> str:
    """Return constraints.txt with the installed versions of torch and Triton.

    On a machine without a GPU that is torch's CPU build; pip would prefer the CUDA build, which is several GB.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("torch==", "triton=="))]
    return "\n".join([*kept, *(f"{name}=={version(name)}" for name in ("torch", "triton"))]) + "\n"

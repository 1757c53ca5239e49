"""A released version, from its wheel, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.producer.driving import Queue
from tests.worker.harness import PATIENCE_S, RUN_WORKER

(WHEEL,) = Path(__file__).parent.glob("pagemill-*.whl")

_SUBMIT = """
import json, sys
from pagemill import Producer
with Producer(sys.argv[1], queue=sys.argv[2]) as queue:
    jobs = json.loads(sys.argv[3])
    ids = [queue.submit(job).id for job in jobs]
    batch = queue.submit_many(jobs * 3, batch_id="batch")
print(json.dumps(ids))
"""


@cache
def released_script(name: str) -> str:
    """A Lua script of that version, with what it includes."""
    included: set[str] = set()

    def expand(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        text = wheel.read(f"pagemill/producer/wire/lua/{name}.lua").decode()
        return re.sub(r"^-- @include (\w+)\n", lambda match: expand(match[1]), text, flags=re.MULTILINE)

    with zipfile.ZipFile(WHEEL) as wheel:
        return expand(name)


def released_pull(queue: Queue, worker: str, max_jobs: int) -> list[str]:
    """Pull jobs of the model `m` as that version's workers do; their ids."""
    arguments = (worker, 60_000, max_jobs, 1 << 40, 0, 1 << 30, "1", "m")
    jobs, *_ = queue.client.eval(released_script("pull"), 1, queue.prefix, *arguments)
    return [job[0].decode() for job in jobs]


class Release:
    """The code in `root`: a released version's, or this tree's."""

    def __init__(self, root: Path, logs: Path) -> None:
        self._root = root
        self._logs = logs
        assert Path(self._python("import pagemill; print(pagemill.__file__)").strip()).is_relative_to(root)

    @classmethod
    def unpacked(cls, directory: Path) -> Release:
        root = directory / WHEEL.stem
        with zipfile.ZipFile(WHEEL) as wheel:
            wheel.extractall(root)
        return cls(root, directory)

    def submit(self, url: str, queue: str, jobs: list[dict[str, Any]]) -> list[str]:
        """Each job by itself, then three times each as a batch named "batch"; the ids of the first."""
        ids: list[str] = json.loads(self._python(_SUBMIT, url, queue, json.dumps(jobs)))
        return ids

    def ready_workers(self, url: str, queue: str) -> list[str]:
        told = self._run("-m", "pagemill", "workers", "--json", "--redis-url", url, "--queue", queue)
        return [info["id"] for info in json.loads(told) if info["state"] == "ready"]

    def command(self, url: str, queue: str, *words: str) -> str:
        """What `pagemill` prints."""
        return self._run("-m", "pagemill", *words, "--redis-url", url, "--queue", queue)

    def worker(self, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
        with (self._logs / "worker.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", RUN_WORKER, json.dumps(settings)],
                cwd=self._root, env=self._environment(), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _python(self, script: str, *arguments: str) -> str:
        return self._run("-c", script, *arguments)

    def _run(self, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._root, env=self._environment(), stdout=subprocess.PIPE, text=True, check=True,
            timeout=PATIENCE_S,
        ).stdout  # fmt: skip

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self._root), os.environ.get("PYTHONPATH")]))
        return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

"""docs/architecture.md shows the real path of a job through the worker."""

from __future__ import annotations

import ast
import os
import re
import threading
from types import FrameType

import pytest

from tests.conftest import ROOT
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

MAX_STOPS, MAX_FILES, MAX_NAMES = 20, 9, 30
ROW = re.compile(r"\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|")
LISTENERS = {"worker/jobs/job_counters.py", "worker/jobs/journal.py"}
MEASURES = {"worker/jobs/speed.py", "worker/jobs/leases.py"}
"""Files of worker/jobs that the same threads call while no job is on its path."""


def documented() -> list[tuple[str, str]]:
    """The stops that the page shows, as file and function."""
    return ROW.findall((ROOT / "docs" / "architecture.md").read_text())


def passed() -> set[str]:
    """The types that, according to the page, are passed between the stops."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return set(re.findall(r"`(\w+)`", text.partition("Between them pass")[2].partition(":\n")[0]))


def annotated(stops: list[tuple[str, str]]) -> set[str]:
    """The names in the signatures of the functions of these files."""
    names = set()
    for file in {file for file, _ in stops}:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.FunctionDef):
                hints = [each.annotation for each in (*node.args.args, *node.args.kwonlyargs)] + [
                    node.returns
                ]
                names |= {
                    part.id for hint in hints if hint for part in ast.walk(hint) if isinstance(part, ast.Name)
                }
    return names


def test_the_path_has_few_names() -> None:
    stops = documented()
    names = {part for _, function in stops for part in function.split(".")}
    assert len(passed()) >= 5
    assert passed() <= annotated(stops), "the page names a type that no stop takes or returns"
    assert len(names | passed()) <= MAX_NAMES


def traced(client: QueueClient) -> list[tuple[str, str]]:
    """The calls, as file and function, of a worker's threads while it runs one job."""
    calls: list[tuple[str, str]] = []
    is_on = False

    def note(frame: FrameType, event: str, _: object) -> None:
        if is_on and event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    threading.setprofile(note)
    try:
        config = worker_config(client.url, client.queue, model="echo:50", checkpoint_tokens=1)
        with running_worker(config) as worker:
            is_on = True
            client.wait(client.submit({"prompt": "hello", "max_tokens": 20}))
            eventually(lambda: worker.counters.jobs_finished.read()["succeeded"], "the job to be counted")
            is_on = False
    finally:
        threading.setprofile(None)
        client.redis.close()
    names = {file: os.path.relpath(os.path.realpath(file), ROOT) for file, _ in calls}
    return [(names[file], function) for file, function in calls]


@pytest.mark.slow
def test_the_page_shows_the_path_of_a_job(valkey_url: str, queue_name: str) -> None:
    stops = documented()
    files = {file for file, _ in stops}
    assert 0 < len(stops) <= MAX_STOPS
    assert len(files) <= MAX_FILES
    calls = traced(QueueClient(valkey_url, queue_name))
    place = -1
    for stop in stops:
        assert stop in calls, f"{stop} is not called"
        assert stop in calls[place + 1 :], f"{stop} comes before the stop that the page has above it"
        place = calls.index(stop, place + 1)
    journal = calls.index(("worker/jobs/journal.py", "Journal.ended"))
    assert journal > place, "a job is reported before the server has replied"
    visited = {file for file, _ in calls if file.startswith("worker/jobs/")}
    assert visited <= files | LISTENERS | MEASURES, "the path has a file that the page does not show"

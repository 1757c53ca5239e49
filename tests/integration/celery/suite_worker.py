"""The app and the worker of Celery's own integration tests, served by `pagemill celery-worker`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing import tasks  # noqa: F401  (registers celery.ping)
from celery.utils.nodenames import anon_nodename
from t.integration.tasks import ClassBasedAutoRetryTask  # type: ignore[import-not-found]

START_S = 120.0

app = Celery("celery.tests", broker=os.environ["TEST_BROKER"], backend=os.environ["TEST_BACKEND"])
app.conf.update(result_extended=True, task_create_missing_queues=False)
app.register_task(ClassBasedAutoRetryTask())


@pytest.fixture(scope="session")
def celery_session_worker(
    celery_session_app: Any, celery_includes: Any, celery_class_tasks: Any
) -> Iterator[None]:
    """Replaces the worker that Celery's tests run in a thread. It has the name that they expect."""
    for module in celery_includes:
        celery_session_app.loader.import_task_module(module)
    for task in celery_class_tasks:
        celery_session_app.register_task(task)
    command = [
        sys.executable, "-m", "pagemill", "celery-worker", "--model", "echo", "--queue", "celery",
        "--concurrency", "1", "--celery-app", f"{__name__}:app", "--", "-n", anon_nodename(),
    ]  # fmt: skip
    process = subprocess.Popen(command)
    give_up = time.monotonic() + START_S
    while not celery_session_app.control.inspect(timeout=1).ping():
        assert process.poll() is None, "the worker exited"
        assert time.monotonic() < give_up, "the worker does not answer"
    yield
    process.terminate()
    process.wait(timeout=START_S)

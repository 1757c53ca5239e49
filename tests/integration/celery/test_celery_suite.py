"""Celery's own integration tests, run against the worker that `pagemill celery-worker` starts."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT, RedisServer, server_binary

FILES = ("test_redis_backend", "test_canvas", "test_group_chains", "test_inspect", "test_tasks")
"""The first one expects that no earlier test has left a subscription."""
OTHER_FILES = {
    "test_backend": "needs Azure",
    "test_backend_leak_in_fixture_teardown": "starts its own worker in the process of the tests",
    "test_beat": "tests the scheduler, which Pagemill does not serve",
    "test_cache_backend": "needs memcached",
    "test_connection_recovery": "tests connections, without a worker",
    "test_database_backend": "needs SQLAlchemy",
    "test_events_state_memory_leak": "measures the memory of Celery's monitor",
    "test_loader": "tests the client's loader, without a worker",
    "test_logfile_format": "tests the names of log files, without a worker",
    "test_mem_leak_in_exception_handling": "measures the memory of the process of the tests",
    "test_request_backend_down": "calls the worker's classes, without a worker",
    "test_security": "signs messages with keys that only a worker in the process of the tests has",
    "test_serialization": "starts its own worker processes",
    "test_upgrade": "tests a command that rewrites settings",
    "test_worker": "starts its own prefork workers",
}
EXCLUDED = {
    "needs prefork: threads have neither soft time limits nor a list of processes": (
        "test_canvas::test_chain::test_chord_soft_timeout_recuperation",
        "test_inspect::test_Inspect::test_stats",
    ),
    "expects settings that Celery's own test worker makes": ("test_inspect::test_Inspect::test_conf",),
    "changes the settings of a worker in the process of the tests": (
        "test_canvas::test_chord::test_disabling_flag_allow_error_cb_on_chord_header",
        "test_canvas::test_chord::test_enabling_flag_allow_error_cb_on_chord_header",
        "test_canvas::test_chord::test_flag_allow_error_cb_on_chord_header_on_upgraded_chord",
    ),
    "reads the state, the signals or the log of a worker in the process of the tests": (
        "test_canvas::test_stamping_mechanism::test_stamping_workflow",
        "test_canvas::test_stamping_mechanism::test_task_received_has_access_to_stamps",
        "test_canvas::test_stamping_mechanism::test_all_tasks_of_canvas_are_stamped",
        "test_canvas::test_stamping_mechanism::test_replace_merge_stamps",
        "test_canvas::test_stamping_mechanism::test_linking_stamped_sig",
        "test_canvas::test_stamping_mechanism::test_err_linking_stamped_sig",
        "test_canvas::test_stamping_mechanism::test_stamps_remain_on_task_retry",
        "test_inspect::test_Inspect::test_hello_stamps_received_revoked_ids_locally",
        "test_tasks::test_tasks::test_send_task_without_ignore_result_uses_task_ignore_result",
        "test_tasks::test_tasks::test_send_task_without_ignore_result_stores_result",
        "test_tasks::test_tasks::test_revoked_by_headers_simple_canvas",
        "test_tasks::test_trace_log_arguments",
        "test_tasks::test_task_redis_result_backend::test_retry_preserves_ignore_result",
        "test_tasks::test_task_replacement::test_replaced_task_nesting_level",
        "test_tasks::test_task_replacement::test_replaced_task_nesting_chain",
        "test_tasks::test_signal_bound_method_receivers",
    ),
}
"""Prefixes of test ids, by the reason why the tests do not apply."""
CONFTEST = "\nfrom tests.integration.celery.suite_worker import celery_session_worker  # noqa: E402\n"
PYTEST_INI = """
[pytest]
addopts = -p no:cacheprovider -p celery.contrib.pytest -q -ra
python_classes = test_*
markers =
    flaky: of pytest-rerunfailures
    celery: of Celery's plugin
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with Celery's tests, from its source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--dest", str(tmp_path), f"celery=={version('celery')}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        pytest.skip(f"no source distribution of Celery: {lines[-1] if lines else 'pip failed'}")
    (archive,) = tmp_path.glob("celery-*.tar.gz")
    with tarfile.open(archive) as file:
        members = [member for member in file if "/t/" in member.name]
        file.extractall(tmp_path, members, filter="data")
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    with (folder / "t" / "integration" / "conftest.py").open("a") as conftest:
        conftest.write(CONFTEST)
    (folder / "pytest.ini").write_text(PYTEST_INI)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_celerys_integration_tests_pass(suite: Path, tmp_path: Path) -> None:
    integration = suite / "t" / "integration"
    assert {path.stem for path in integration.glob("test_*.py")} == {*FILES, *OTHER_FILES}
    command = [sys.executable, "-m", "pytest", *(f"t/integration/{name}.py" for name in FILES)]
    for test in itertools.chain(*EXCLUDED.values()):
        module, _, name = test.partition("::")
        command += ["--deselect", f"t/integration/{module}.py::{name}"]
    server = RedisServer(server_binary("valkey-server"), tmp_path / "valkey")
    server.start()
    try:
        environment = os.environ | {
            "PYTHONPATH": f"{suite}:{ROOT}",
            "TEST_BROKER": server.url,
            "TEST_BACKEND": server.url,
            "REDIS_PORT": server.url.rpartition(":")[2].partition("/")[0],
            "PAGEMILL_REDIS_URL": server.url,
        }
        done = subprocess.run(
            command, cwd=suite, env=environment, capture_output=True, text=True, timeout=3500, check=False
        )
    finally:
        server.stop()
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 250, done.stdout

"""`pagemill run s3://... --out s3://...` as users type it, against a local server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pagemill.__main__ import app
from tests.integration.cli.test_run import environment
from tests.producer.dataset.s3_server import SECRET, Bucket, running_s3
from tests.worker.harness import running_worker, worker_config

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(queue_name: str) -> Iterator[Bucket]:
    with running_s3() as url:
        yield Bucket(url, queue_name)


@pytest.fixture
def pagemill(
    bucket: Bucket, valkey_url: str, queue_name: str, tmp_path: Path
) -> Iterator[Callable[..., Result]]:
    settings = environment(valkey_url, queue_name) | bucket.settings
    settings["PAGEMILL_STATE_DIR"] = str(tmp_path / "state")

    def run(*arguments: str) -> Result:
        words = ("--template", "{{ text }}", "--no-chat", "--max-tokens", "20", "--model", "echo")
        done = CliRunner().invoke(app, ["run", *arguments, *words], env=settings)
        assert SECRET not in done.stdout + done.stderr
        return done

    with running_worker(worker_config(valkey_url, queue_name)):
        yield run


def test_a_run_from_bucket_to_bucket(pagemill: Callable[..., Result], bucket: Bucket, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(30)) + "{torn\n"
    source, out = bucket.put("in/rows.jsonl.gz", gzip.compress(rows.encode())), bucket("out/rows.jsonl.gz")
    assert pagemill(source, "--out", out, "--dry-run").exit_code == 4
    done = pagemill(source, "--out", out)
    assert done.exit_code == 4, done.stderr
    assert f"All reasons are in {out}.errors.jsonl" in done.stderr
    assert f"{out}.report.html" in done.stdout
    lines = [json.loads(line) for line in gzip.decompress(bucket.get("out/rows.jsonl.gz")).splitlines()]
    assert [line["output"] for line in lines] == [f"row {i}" for i in range(30)]
    report = json.loads(bucket.get("out/rows.jsonl.gz.report.json"))
    assert (report["input"], report["output"], report["rows"]) == (source, out, 31)
    assert bucket.names() == {
        "in/rows.jsonl.gz",
        *(
            f"out/rows.jsonl.gz{end}"
            for end in ("", ".errors.jsonl", ".run.json", ".report.html", ".report.json")
        ),
    }
    assert not [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    trial = bucket("trial.csv.zst")
    estimate = pagemill(source, "--out", trial, "--estimate", "--limit", "5")
    assert "all 31 rows: about" in estimate.stderr
    assert {"trial.csv.zst.partial"} == bucket.names() & {"trial.csv.zst", "trial.csv.zst.partial"}
    assert pagemill(source, "--out", trial).exit_code == 4
    local = tmp_path / "local.jsonl"
    assert pagemill(trial, "--out", f"file://{local}", "--output-column", "again").exit_code == 0
    assert len(local.read_text().splitlines()) == 30


def test_an_early_stop_keeps_the_journal_here(pagemill: Callable[..., Result], bucket: Bucket) -> None:
    source = bucket.put("rows.jsonl", b'{"text": "a"}\n')
    away = pagemill(source, "--out", bucket("out.jsonl"), "--detach", "--json")
    assert json.loads(away.stdout) == {"submitted": 1}
    assert bucket.names() == {"rows.jsonl", "out.jsonl.partial"}
    assert pagemill(source, "--out", bucket("out.jsonl")).exit_code == 0
    refused = pagemill(source, "--out", "s3://no-such-bucket/out.jsonl")
    assert refused.exit_code == 2
    assert (
        "s3://no-such-bucket/out.jsonl cannot be written (the bucket or folder is not there)"
        in refused.stderr
    )
    assert "Traceback" not in refused.stderr

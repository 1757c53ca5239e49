"""A dry run checks every prompt's length against the model's limit, and prints long ones without their middle."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagemill.__main__ import app
from pagemill.cli.dry_run import KNOWN_LIMITS
from pagemill.cli.run import _template_text
from pagemill.engine.models.echo import ECHO_MAX_MODEL_LEN
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config


@pytest.fixture
def templated(tmp_path: Path) -> Path:
    """A model's folder without weights; its template renders `chat_template.jinja`."""
    folder = tmp_path / "templated"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(packaged_model_directory() / name, folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    texts = ["short", "x" * 108_000, "y", "word " * 2_000]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def dry_run(
    rows: Path,
    *options: str,
    url: str | None = None,
    queue: str = "default",
    state: Path,
    is_dry: bool = True,
) -> Any:
    where = ["--redis-url", url] if url else []
    command = [
        "run",
        str(rows),
        "--out",
        str(rows.with_name("out.jsonl")),
        *(["--dry-run"] if is_dry else []),
        "--queue",
        queue,
        *where,
    ]
    template = [] if "--template" in options or rows.suffix == ".yaml" else ["--template", "{{ text }}"]
    environment = {"PAGEMILL_STATE_DIR": str(state), "PAGEMILL_REDIS_URL": ""}
    return CliRunner().invoke(app, [*command, *template, *options], env=environment)


def test_a_byte_order_mark_is_not_part_of_the_template(tmp_path: Path) -> None:
    file = tmp_path / "template.txt"
    file.write_text("\ufeffSay {{ text }}")
    assert _template_text(None, file) == "Say {{ text }}"


@pytest.mark.slow
def test_a_prompt_too_long_for_the_model_is_found_without_a_server(rows: Path, tmp_path: Path) -> None:
    done = dry_run(rows, "--model", "smollm2", state=tmp_path)
    assert done.exit_code == 4, done.output
    assert "1 too long for the model's 8,192 (the first: row 2)" in done.stderr
    assert "27,030 prompt tokens" in done.stdout
    assert len(done.stdout) < 6_000
    assert "... 106,200 characters ..." in done.stdout
    assert dry_run(rows, "--model", "smollm2", "--limit", "1", state=tmp_path).exit_code == 0


@pytest.mark.slow
def test_the_counts_are_the_prompt_tokens_of_the_run(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("short", "größer 漢字", "a " * 300))
    )
    at: dict[str, Any] = {"url": valkey_url, "queue": queue_name, "state": tmp_path}
    tool = {"type": "function", "function": {"name": "f"}}
    variants: list[tuple[str, ...]] = [
        ("--field", "max_tokens=1", "--system", "Be brief."),
        ("--field", "max_tokens=1", "--no-chat", "--field", "truncate_prompt_tokens=50"),
        ("--field", "max_tokens=1", "--field", f"tools={json.dumps([tool])}"),
        ("--field", "task=score"),
    ]
    with running_worker(
        worker_config(valkey_url, queue_name, model="smollm2", kv_cache_memory_bytes=64 << 20, num_threads=1)
    ):
        for options in variants:
            options = ("--model", "smollm2", "--overwrite", *options)
            shown = dry_run(rows, *options, "--json", **at)
            assert shown.exit_code == 0, shown.output
            counted = [json.loads(line) for line in shown.stdout.splitlines()]
            assert all(row["exact"] for row in counted)
            done = dry_run(rows, *options, is_dry=False, **at)
            assert done.exit_code == 0, done.output
            lines = map(json.loads, rows.with_name("out.jsonl").read_text().splitlines())
            assert [row["prompt_tokens"] for row in counted] == [
                line["_pagemill"]["usage"]["prompt_tokens"] for line in lines
            ], options


@pytest.mark.slow
def test_a_template_that_hangs_makes_bad_rows(templated: Path, tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"text": "a"}\n')
    (templated / "chat_template.jinja").write_text(
        "{% for i in range(9**5) %}{{ range(9**5)|sum }}{% endfor %}"
    )
    done = dry_run(rows, "--model", str(templated), state=tmp_path)
    assert (done.exit_code, "1 bad" in done.stderr) == (4, True), done.output
    assert "bad row: the chat template takes more than 2 s of CPU time" in done.stdout


def test_prompts_of_an_unknown_model_are_estimated(templated: Path, tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"text": "a"}\n')
    assert "about 1 prompt tokens" in dry_run(rows, "--model", "elsewhere", state=tmp_path).stdout
    (templated / "tokenizer.json").write_text("{")
    done = dry_run(rows, "--model", str(templated), state=tmp_path)
    assert "about 1 prompt tokens" in done.stdout
    assert "estimating the tokens of prompts: can't load the tokenizer" in done.stderr


def test_rows_beyond_the_first_thousand_are_looked_at(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join('{"text": "a"}\n' for _ in range(1_500)) + json.dumps({"text": "x" * 20_000}))
    done = dry_run(rows, "--model", "echo", state=tmp_path)
    assert (done.exit_code, "row 1,501" in done.stderr) == (4, True), done.output


def test_a_directory_says_its_own_limit(rows: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"text_config": {"max_position_embeddings": 30000}}')
    assert "the model takes 30,000" in dry_run(rows, "--model", f"{model}/", state=tmp_path).stderr
    (model / "config.json").write_text("[]")
    done = dry_run(rows, "--model", f"{model}/", state=tmp_path)
    assert (done.exit_code, "whether that fits is not known" in done.stderr) == (0, True)
    done = dry_run(rows, "--model", "echo", "--worker-option", "max_model_len=200000", state=tmp_path)
    assert "the model takes 200,000" in done.stderr


@pytest.mark.slow
def test_a_live_worker_says_what_it_takes(rows: Path, tmp_path: Path, client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue, model="echo", max_model_len=512)):
        eventually(lambda: any(w.max_model_len for w in client.workers()), "the worker's limit")
        done = dry_run(rows, url=client.url, queue=client.queue, state=tmp_path)
        assert "2 too long for the model's 512 (the first: row 2)" in done.stderr
        done = dry_run(rows, "--model", "elsewhere", url=client.url, queue=client.queue, state=tmp_path)
        assert "whether that fits is not known" in done.stderr


def test_of_several_workers_the_smallest_limit_holds(rows: Path, tmp_path: Path, client: QueueClient) -> None:
    for name, limit in (("a", 700), ("b", 600), ("c", None)):
        info = WorkerInfo(id=name, models=("m",), max_model_len=limit)
        client.run(registry.heartbeat(client.queue, info, ttl_ms=300_000))
    done = dry_run(rows, "--model", "m", url=client.url, queue=client.queue, state=tmp_path)
    assert "too long for the model's 600" in done.stderr


def test_a_row_that_truncates_its_prompt_is_never_too_long(rows: Path, tmp_path: Path) -> None:
    done = dry_run(rows, "--model", "echo", "--field", "truncate_prompt_tokens=100", state=tmp_path)
    assert (done.exit_code, "100 at most" in done.stderr) == (0, True), done.output


def test_bad_rows_fail_a_dry_run_and_skipped_ones_do_not(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"text": "a"}\n{"text": null}\n')
    done = dry_run(rows, "--model", "echo", state=tmp_path)
    assert (done.exit_code, "1 bad" in done.stderr) == (4, True)
    done = dry_run(rows, "--model", "echo", "--on-empty", "skip", state=tmp_path)
    assert (done.exit_code, "0 bad, 1 skipped" in done.stderr) == (0, True)
    done = dry_run(rows, "--model", "echo", "--where", "text is not none", state=tmp_path)
    assert (done.exit_code, "1 rows looked at: 0 bad" in done.stderr) == (0, True)


def test_a_row_that_several_steps_cannot_use_is_counted_once(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"text": "a"}\n{"text": null}\n{"text": null}\n')
    recipe = tmp_path / "recipe.yaml"
    steps = [{"name": name, "prompt": "{{ text }}", "max_tokens": 1} for name in ("one", "two", "three")]
    recipe.write_text(json.dumps({"model": "echo", "steps": steps}))
    done = dry_run(recipe, str(rows), state=tmp_path)
    assert (done.exit_code, "3 of 3 rows looked at: 2 bad" in done.stderr) == (4, True), done.output
    done = dry_run(recipe, str(rows), "--on-empty", "skip", state=tmp_path)
    assert (done.exit_code, "0 bad, 2 skipped" in done.stderr) == (0, True), done.output


def test_a_worker_of_a_later_version_is_still_read() -> None:
    info = WorkerInfo.model_validate_json('{"id": "w", "models": ["m"], "invented_later": 1}')
    assert info.id == "w"


def test_the_known_limits_are_the_models_own() -> None:
    config = json.loads((packaged_model_directory() / "config.json").read_text())
    limits = {"smollm2": config["max_position_embeddings"], "echo": ECHO_MAX_MODEL_LEN}
    assert limits == KNOWN_LIMITS


def test_ctrl_c_names_no_submitted_jobs(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **options: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("pagemill.cli.run.preview", stop)
    done = dry_run(rows, "--model", "echo", state=tmp_path)
    assert (done.exit_code, done.stderr) == (130, "\nstopped\n")


@pytest.mark.slow
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_rows_come_from_standard_input(compress: Any, tmp_path: Path) -> None:
    data = compress(b'{"text": "a"}\n{"text": "b"}\n')
    command = ["run", "-", "--out", str(tmp_path / "out.jsonl"), "--dry-run", "--template", "{{ text }}"]
    done = CliRunner().invoke(app, [*command, "--model", "echo", "--queue", "q"], input=data)
    assert done.exit_code == 0, done.output
    assert "2 of 2 rows looked at: 0 bad" in done.stderr
    done = CliRunner().invoke(app, [*command, "--model", "echo", "--format", "csv"], input=b"text\na\n")
    assert "1 of 1 rows" in done.stderr

"""`pagemill run --escalate-below` as users type it: real workers and models, exit codes, kill -9."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_llama
from tests.integration.cli.test_run import bare_environment, environment
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

TEXTS = ["I loved it", "never again", "a waste of money", "quite good", "I loved it"]
RUN = (
    "run", "in.jsonl", "--out", "out.jsonl", "--template", "Review: {{ text }}. The review is", "--no-chat",
    "--choices", "good,bad", "--label-probs", "mean", "--model", "echo",
)  # fmt: skip


def write_rows(folder: Path, texts: list[str] = TEXTS) -> None:
    rows = ({"text": text, "side": ("good", "bad")[i % 2]} for i, text in enumerate(texts))
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def pagemill(folder: Path, settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagemill", *RUN, *arguments], cwd=folder, env=settings, text=True,
        capture_output=True, timeout=4 * PATIENCE_S, check=False,
    )  # fmt: skip


def test_from_an_echo_to_smollm2(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    """The second model's probabilities equal those of a direct call."""
    write_rows(tmp_path)
    big = worker_config(
        valkey_url, queue_name, model="smollm2", kv_cache_memory_bytes=128 << 20, num_threads=1
    )
    with (
        running_worker(worker_config(valkey_url, queue_name)),
        running_worker(big, load_patience_s=400),
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        done = pagemill(
            tmp_path, environment(valkey_url, queue_name), "--gold", "side", "--escalate-below", "1", "--to", "smollm2"
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        direct = producer.submit(
            prompt=f"Review: {TEXTS[0]}. The review is", model="smollm2", label_probs="mean",
            structured_outputs={"choice": ["good", "bad"]},
        ).result(timeout=300)  # fmt: skip
    lines = read(tmp_path)
    assert [(line["label_stage"], line["label_model"]) for line in lines] == [(2, "smollm2")] * 5
    assert lines[0]["label_probs"] == pytest.approx(direct.label_probs, abs=1e-5)
    assert [entry["model"] for entry in lines[0]["label_answers"]] == ["echo", "smollm2"]
    assert lines[0]["label_answers"] == lines[4]["label_answers"]
    assert "stage 2: smollm2" in done.stdout
    assert "1 (this run)" in done.stdout
    facts = json.loads((tmp_path / "out.jsonl.report.json").read_text())["cascade"]
    assert [(stage["rows"], stage["jobs"]) for stage in facts["stages"]] == [(5, 4), (5, 4)]
    assert all(stage["seconds"] > 0 for stage in facts["stages"])
    assert 'aria-label="accuracy against tokens per row"' in (tmp_path / "out.jsonl.report.html").read_text()


def test_two_tiny_checkpoints(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    for name, std in (("little", 0.6), ("large", 0.9)):
        save_tiny_llama(tmp_path / name, std=std)
        tokenizer = Tokenizer(
            WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0")
        )
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
    labels = ["w11", "w12 w13", "w14"]
    rows = [{"text": f"w{i % 50} w{i % 7} w20"} for i in range(40)]
    pipeline = Pipeline("{{ text }}", model="little", chat=False, choices=labels, label_probs="product")
    settings = {"num_kv_blocks": 64, "num_threads": 1}
    with (
        running_worker(worker_config(valkey_url, queue_name, model=str(tmp_path / "little"), **settings)),
        running_worker(worker_config(valkey_url, queue_name, model=str(tmp_path / "large"), **settings)),
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        alone = {
            model: Pipeline("{{ text }}", model=model, chat=False, choices=labels, label_probs="product")
            .run(rows, out=tmp_path / f"{model}.jsonl", producer=producer).succeeded
            for model in ("little", "large")
        }  # fmt: skip
        summary = pipeline.run(
            rows, out=tmp_path / "both.jsonl", producer=producer, escalate_below=0.9, to="large"
        )
    assert alone == {"little": 40, "large": 40}
    files = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("little", "large", "both")
    }
    for little, large, both in zip(*files.values(), strict=True):
        wanted = large if little["label_prob"] < 0.9 else little
        assert both["label"] == wanted["label"]
        assert both["label_probs"] == pytest.approx(wanted["label_probs"], abs=1e-5)
    assert summary.stages is not None
    assert 0 < summary.stages.stages[1].rows < 40


def test_workers_are_started_for_every_model(tmp_path: Path) -> None:
    write_rows(tmp_path)
    settings = bare_environment() | {"PAGEMILL_STATE_DIR": str(tmp_path / "state")}
    done = pagemill(tmp_path, settings, "--escalate-below", "1", "--to", "echo:0:big", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert [line["label_model"] for line in read(tmp_path)] == ["big"] * 5


def test_a_model_that_nobody_serves_is_told_and_waited_for(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    write_rows(tmp_path)
    command = [sys.executable, "-m", "pagemill", *RUN, "--escalate-below", "1", "--to", "big"]
    with running_worker(worker_config(valkey_url, queue_name)):
        run = subprocess.Popen(
            command, cwd=tmp_path, env=environment(valkey_url, queue_name), stderr=subprocess.PIPE, text=True
        )
        assert run.stderr is not None
        wanted = f"no live worker of queue {queue_name} serves big; the jobs will wait for one\n"
        assert run.stderr.readline() == wanted
        with running_worker(worker_config(valkey_url, queue_name, model="echo:0:big")):
            _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, said
    assert [line["label_model"] for line in read(tmp_path)] == ["big"] * 5


def test_a_model_that_fails_leaves_the_first_answers(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    """These prompts exceed the second model's context."""
    write_rows(tmp_path)
    small, big = (
        worker_config(valkey_url, queue_name, model=model, max_model_len=length)
        for model, length in (("echo", 512), ("echo:0:big", 24))
    )
    with running_worker(small), running_worker(big):
        done = pagemill(tmp_path, environment(valkey_url, queue_name), "--escalate-below", "1", "--to", "big")
    assert done.returncode == 4, done.stderr
    assert "a later model failed for 5 rows, the first: prompt_too_long" in done.stderr
    assert [line["label_model"] for line in read(tmp_path)] == ["echo"] * 5
    assert all("prompt_too_long" in line["label_answers"][1]["error"] for line in read(tmp_path))
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--escalate-below", "0.8"), "--escalate-below needs --to MODEL"),
        (("--escalate-below", "0.8", "--to", "no model"), "a served model's name"),
        (("--escalate-below", "0.8", "--to", "openai:https://host/v1/big.gguf"), "set --api-budget TOKENS"),
        (("--escalate-below", "0.8", "--to", "big", "--label-temperature", "1,x"), "--label-temperature"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    arguments: tuple[str, ...], says: str, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    write_rows(tmp_path)
    done = pagemill(tmp_path, environment(valkey_url, queue_name), *arguments)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.replace("│", " ").split())
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


def test_killed_while_a_slow_model_is_at_work(tmp_path: Path, client: QueueClient) -> None:
    """The queue has counted exactly one finished job for each row and stage."""
    write_rows(tmp_path, [f"text {i}" for i in range(60)])
    options = ("--escalate-below", "1", "--to", "big", "--quiet", "--window", "10")
    command = [sys.executable, "-m", "pagemill", *RUN, *options]
    settings = environment(client.url, client.queue)
    big = worker_config(client.url, client.queue, model="echo:20:big", max_num_seqs=4)
    with running_worker(worker_config(client.url, client.queue)), running_worker(big) as worker:
        for _ in range(3):
            run = subprocess.Popen(command, cwd=tmp_path, env=settings)
            eventually(lambda: len(worker.table) > 0 or run.poll() is not None, "an escalation")  # noqa: B023
            time.sleep(0.2)
            run.send_signal(signal.SIGKILL)
            assert run.wait(PATIENCE_S) == -signal.SIGKILL
        done = subprocess.run(command, cwd=tmp_path, env=settings, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0
    counts = client.stats().counts
    assert counts["succeeded"] == 120
    assert [line["label_model"] for line in read(tmp_path)] == ["big"] * 60

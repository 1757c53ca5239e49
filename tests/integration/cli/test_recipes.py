"""`pagemill run recipe.yaml` with real workers: label, then summarize only the positives; usage; the dry run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from tests.integration.cli.test_run import environment
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

TEXTS = ["I loved it, wonderful", "terrible, a waste of money", "What a great story", "awful and boring"]
RECIPE = """
model: smollm2
steps:
  - name: label
    prompt: "Review: {{ text }}. Positive or negative?"
    choices: [positive, negative]
    label_probs: product
    gold: side
    examples:
      - {text: I hated it, output: negative}
      - {text: I loved it, output: positive}
  - name: why
    prompt: "Review: {{ text }}. In a few words, why is it {{ label.text }}?"
    when: {label: positive}
    max_tokens: 8
"""
ECHO = """
model: echo
defaults: {chat: false, max_tokens: 40}
steps:
  - {name: first, prompt: "one {{ text }}"}
  - {name: second, prompt: "two {{ first.text }}", column: then}
"""


def write(folder: Path, recipe: str, texts: list[str] = TEXTS) -> None:
    (folder / "recipe.yaml").write_text(recipe)
    rows = ({"text": text, "side": ("positive", "negative")[i % 2]} for i, text in enumerate(texts))
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def pagemill(folder: Path, settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagemill", "run", *arguments], cwd=folder, env=settings, text=True,
        capture_output=True, timeout=4 * PATIENCE_S, check=False,
    )  # fmt: skip


def test_smollm2_labels_and_explains_only_the_positives(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    """Both steps return the output of a direct call of the model."""
    write(tmp_path, RECIPE)
    config = worker_config(
        valkey_url, queue_name, model="smollm2", kv_cache_memory_bytes=128 << 20, num_threads=1
    )
    with (
        running_worker(config, load_patience_s=400),
        Producer(valkey_url, queue=queue_name, model="smollm2") as producer,
    ):
        done = pagemill(
            tmp_path, environment(valkey_url, queue_name), "recipe.yaml", "in.jsonl", "--out", "out.jsonl"
        )
        assert done.returncode == 0, done.stderr
        turns = [("I hated it", "negative"), ("I loved it", "positive"), (TEXTS[0], None)]
        messages = [
            {"role": role, "content": content}
            for text, label in turns
            for role, content in (
                ("user", f"Review: {text}. Positive or negative?"),
                ("assistant", label),
            )
            if content is not None
        ]
        shape = {"choice": ["positive", "negative"]}
        label = producer.submit(messages=messages, structured_outputs=shape, label_probs="product")
        lines = read(tmp_path)
        assert lines[0]["label"] == label.result(timeout=300).label
        assert lines[0]["label_probs"] == pytest.approx(label.result().label_probs, abs=1e-5)
        for line in lines:
            assert (line["why"] is not None) == (line["label"] == "positive")
            if line["label"] == "positive":
                question = f"Review: {line['text']}. In a few words, why is it positive?"
                alone = producer.submit(
                    messages=[{"role": "user", "content": question}], max_tokens=8, temperature=0.0
                )
                assert line["why"] == alone.result(timeout=300).text
    assert {line["label"] for line in lines} >= {"positive"}
    assert "step label" in done.stdout
    facts = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    label_facts, why_facts = facts["steps"]
    positives = sum(line["label"] == "positive" for line in lines)
    assert (label_facts["rows"], why_facts["rows"]) == (4, positives)
    assert label_facts["accuracy"] is not None
    assert sum(why_facts["skipped"].values()) == 4 - positives


def test_killed_in_the_middle_of_a_chain(tmp_path: Path, client: QueueClient) -> None:
    """The queue has counted exactly one finished job for each row and step."""
    write(tmp_path, ECHO, [f"text {i}" for i in range(40)])
    command = [
        sys.executable, "-m", "pagemill", "run", "recipe.yaml", "in.jsonl", "--out", "out.jsonl", "--quiet",
        "--window", "10",
    ]  # fmt: skip
    settings = environment(client.url, client.queue)
    with running_worker(
        worker_config(client.url, client.queue, model="echo:5:echo", max_num_seqs=4)
    ) as worker:
        for _ in range(2):
            run = subprocess.Popen(command, cwd=tmp_path, env=settings)
            eventually(lambda: len(worker.table) > 0 or run.poll() is not None, "a job")  # noqa: B023
            time.sleep(0.3)
            run.send_signal(signal.SIGKILL)
            run.wait(PATIENCE_S)
        done = subprocess.run(command, cwd=tmp_path, env=settings, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0
    counts = client.stats().counts
    assert counts["succeeded"] == 80
    assert [line["then"] for line in read(tmp_path)] == [f"two one text {i}" for i in range(40)]


def test_a_dry_run_shows_the_prompts_of_each_step(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    write(tmp_path, ECHO)
    settings = environment(valkey_url, queue_name)
    done = pagemill(tmp_path, settings, "recipe.yaml", "in.jsonl", "--out", "out.jsonl", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- row 1, step first, ")
    assert f"one {TEXTS[0]}\n--- row 1, step second, " in done.stdout
    assert "two {first.text}" in done.stdout
    assert "4 of 4 rows looked at: 0 bad" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "in.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("recipe.yaml",), "one or more files of rows are required, after a recipe"),
        (("in.jsonl", "recipe.yaml"), "one or more files of rows are required, after a recipe"),
        (("recipe.yaml", "in.jsonl", "--choices", "a,b"), "--choices is for runs of one step"),
        (("recipe.yaml", "in.jsonl", "--temperature", "0"), "--temperature is for runs of one step"),
        (("recipe.yaml", "in.jsonl", "--no-chat"), "--no-chat is for runs of one step"),
        (
            ("bad.yaml", "in.jsonl"),
            "bad.yaml, line 1: the recipe: unknown key 'stops'; did you mean steps?",
        ),
        (("none.yaml", "in.jsonl"), "none.yaml"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    arguments: tuple[str, ...], says: str, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    write(tmp_path, ECHO)
    (tmp_path / "bad.yaml").write_text("stops: []\n")
    done = pagemill(tmp_path, environment(valkey_url, queue_name), *arguments, "--out", "out.jsonl")
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.replace("│", " ").split())

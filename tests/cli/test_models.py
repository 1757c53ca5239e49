"""`pagemill pull` and `pagemill models`, as processes; `doctor --model` of a hub's model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.hub_server import LoopbackHub, running_hub
from tests.worker.harness import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GOOD = {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": b"w" * 1000}
BAD = {"config.json": b'{"model_type": "resnet"}', "model.safetensors": b"w" * 1000}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with running_hub() as hub:
        hub.add("org/good", GOOD)
        hub.add("org/bad", BAD)
        yield hub


def environment(hub: LoopbackHub, tmp_path: Path) -> dict[str, str]:
    caches = {
        "HF_HOME": "hf", "MODELSCOPE_CACHE": "ms", "MODELSCOPE_HOME": "ms-home", "PAGEMILL_CACHE_DIR": "own",
    }  # fmt: skip
    hubs = {"HF_ENDPOINT": hub.url, "MODELSCOPE_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    return os.environ | hubs | {name: str(tmp_path / folder) for name, folder in caches.items()}


@pytest.fixture
def run(hub: LoopbackHub, tmp_path: Path) -> Run:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagemill", *words]
        return subprocess.run(command, env=environment(hub, tmp_path), capture_output=True, text=True)

    return run


def test_what_is_pulled_is_listed(run: Run, hub: LoopbackHub, tmp_path: Path) -> None:
    commit = hub.repositories["org/good"].commit
    empty = run("models")
    assert (empty.returncode, empty.stderr) == (0, "no model is cached; get one: pagemill pull org/name\n")
    pulled = run("pull", "org/good", "--json")
    assert pulled.returncode == 0, pulled.stderr
    assert "downloading 1.0 kB of org/good into" in pulled.stderr
    told = json.loads(pulled.stdout)
    directory = Path(told["directory"])
    assert (directory / "model.safetensors").read_bytes() == b"w" * 1000
    assert (told["hub"], told["commit"], told["size_bytes"]) == (
        "huggingface",
        commit,
        sum(map(len, GOOD.values())),
    )
    elsewhere = tmp_path / "ms/models/org--good/snapshots/master"
    shutil.copytree(directory, elsewhere)
    # Half of a model, and one that cannot run; as other programs leave them.
    (directory / "model.safetensors").unlink()
    strange = tmp_path / "hf/hub/models--org--bad/snapshots" / ("b" * 40)
    strange.mkdir(parents=True)
    for name, content in BAD.items():
        (strange / name).write_bytes(content)
    listed = {found["model"]: found for found in json.loads(run("models", "--json").stdout)}
    assert set(listed) == {"org/good", "org/bad", "modelscope:org/good"}
    assert listed["modelscope:org/good"]["can_run"] is True
    assert listed["modelscope:org/good"]["revisions"] == ["master"]
    assert listed["org/good"]["can_run"] is False
    assert "download the model again" in listed["org/good"]["reason"]
    assert (listed["org/good"]["commit"], listed["org/good"]["revisions"]) == (commit, ["main"])
    assert listed["org/bad"]["can_run"] is False
    assert "'resnet' is not supported" in listed["org/bad"]["reason"]


def test_a_pipe_gets_a_table(run: Run, hub: LoopbackHub) -> None:
    commit = hub.repositories["org/good"].commit
    pulled = run("pull", "org/good")
    assert Path(pulled.stdout.strip(), "model.safetensors").is_file()
    assert f"org/good: commit {commit}, 1.2 kB, in" in pulled.stderr
    header, row = run("models").stdout.splitlines()
    assert header.split("\t") == ["model", "revision", "commit", "size", "can run", "samples with"]
    assert row.split("\t") == ["org/good", "main", commit[:12], "1.2 kB", "yes", ""]


def test_what_cannot_be_run_is_refused_before_its_weights(run: Run, hub: LoopbackHub) -> None:
    refused = run("pull", "org/bad")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "model type 'resnet' is not supported" in line
    assert not hub.downloads("model.safetensors")


def test_a_pull_that_fails_is_one_line(run: Run) -> None:
    absent = run("pull", "org/none")
    assert (absent.returncode, absent.stdout) == (2, "")
    (line,) = absent.stderr.splitlines()
    assert "no model org/none that you can read" in line


def test_ctrl_c_does_not_wait_for_files_that_are_under_way(
    run: Run, hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.hold = threading.Event()
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill", "pull", "org/good"],
        env=environment(hub, tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: hub.downloads("model.safetensors"), "the download")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)  # the hub sends no more data
    finally:
        hub.hold.set()
        process.kill()
    assert process.returncode == 130
    assert said.endswith("the rest comes with: pagemill pull org/good\n")


def finding(run: Run) -> dict[str, str]:
    findings = json.loads(run("doctor", "--json", "--model", "org/good").stdout)["findings"]
    (found,) = [found for found in findings if found["check"] == "model parts"]
    assert isinstance(found, dict)
    return found


def test_doctor_downloads_nothing(run: Run, hub: LoopbackHub) -> None:
    found = finding(run)
    assert (found["level"], found["remedy"]) == ("note", "pagemill pull org/good")
    assert not hub.asked


def test_doctor_names_the_commit(run: Run, hub: LoopbackHub) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a")).to_str().encode()
    hub.add("org/good", GOOD | {"model.safetensors": save({}), "tokenizer.json": tokenizer})
    run("pull", "org/good")
    assert f"org/good, commit {hub.repositories['org/good'].commit}, in " in finding(run)["message"]

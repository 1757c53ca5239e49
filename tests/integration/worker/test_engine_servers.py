"""Real servers of other engines behind the queue, and SIGKILL of each in the middle of its jobs.

They run in the environments of the benchmarks: `python -m benchmarks --install-peers`, see CONTRIBUTING.md.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.dense import dense_smollm2
from benchmarks.engines import peers
from pagemill.engine.models.packaged import find_gguf
from tests.worker.harness import QueueClient, eventually, get_json, running_worker, worker_config

START_S = 400.0
"""The longest startup of a server: vLLM compiles for minutes the first time."""
TOKENS = 96

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def llama_cpp(port: int) -> list[str]:
    # By default each request interrupts the one before it, and so does the worker's query of the list of models.
    return ["-m", "llama_cpp.server", "--model", str(find_gguf()), "--model_alias", "smollm2", "--n_ctx", "2048",
            "--interrupt_requests", "false", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip


def vllm(port: int) -> list[str]:
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", str(dense_smollm2()),
            "--served-model-name", "smollm2", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "8",
            "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip


class EngineServer:
    """The server in a separate process, and its address, which stays."""

    def __init__(self, peer: peers.Peer, arguments: Callable[[int], list[str]], log: Path) -> None:
        python = peer.python()
        if python is None:
            pytest.skip(f"no environment of {peer.name}: python -m benchmarks --install-peers makes it")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._command = [str(python), *arguments(port)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=peers.process_environment(2**30),
                start_new_session=True,
            )
        eventually(self._answers, "the server to answer", START_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
        try:
            return get_json(f"{self.url}/models")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL, also for its child processes."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait(30)


@contextmanager
def running(server: EngineServer) -> Iterator[EngineServer]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


def is_midway(client: QueueClient, ids: list[str]) -> bool:
    """Return whether a job runs whose checkpoint has a part of its output, but not most of it."""
    statuses = [client.status(job_id) for job_id in ids]
    return any(s.state == "running" and 8 < s.progress.generated_tokens < TOKENS // 2 for s in statuses)


@pytest.mark.parametrize(
    ("peer", "arguments", "dialect"),
    [(peers.LLAMACPP, llama_cpp, "unknown"), (peers.VLLM, vllm, "vllm")],
    ids=["llama-cpp-python", "vllm"],
)
def test_jobs_end_once_although_the_server_is_killed(
    client: QueueClient,
    peer: peers.Peer,
    arguments: Callable[[int], list[str]],
    dialect: str,
    tmp_path: Path,
) -> None:
    prompts = [f"Once upon a time, {number} friends went to" for number in range(3, 9)]
    jobs = [
        {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "model": "smollm2"} for prompt in prompts
    ]
    chat = {"messages": [{"role": "user", "content": "Name a color."}], "max_tokens": 8, "model": "smollm2"}
    with running(EngineServer(peer, arguments, tmp_path / "server.log")) as server:
        config = worker_config(
            client.url, client.queue, engine_url=server.url, served_model_name="smollm2", model=None,
            max_num_seqs=1, checkpoint_s=0.05, lease_s=60.0,
        )  # fmt: skip
        with running_worker(config, START_S) as worker:
            assert worker.engine.engine.identity.dialect.name == dialect  # type: ignore[attr-defined]
            (first,) = client.wait(client.submit(jobs[0]), START_S)
            ids = client.submit(*jobs[1:], chat, batch_id="all")
            eventually(lambda: is_midway(client, ids), "a part of an output", START_S)
            server.kill()
            eventually(lambda: client.counts("all").running == 0, "the jobs to be back")
            server.start()
            results = [outcome.value() for outcome in client.wait(ids, START_S)]
            assert worker.failure() is None
            assert worker.counters.commits.read()["fenced"] == 0
    assert first.value() is not None
    assert client.counts("all").succeeded == len(ids)
    for job_id, result in zip(ids, results, strict=True):
        assert result is not None
        assert result.text
        assert client.status(job_id).attempt == 1
        assert result.usage.completion_tokens <= TOKENS
    assert any(result is not None and result.resumed_tokens for result in results), "the text went on"

"""A worker whose engine is an endpoint of another program, and all failures of that program."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemill.engine.errors import ConfigError, DeviceLost
from pagemill.engine.text.tokenizer import ByteTokenizer
from pagemill.worker.config import WorkerConfig
from pagemill.worker.engine_host.messages import EngineState
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.worker import Worker
from tests.worker.engine_host.endpoint import stub as stub_module
from tests.worker.engine_host.endpoint.stub import KEY, TEXT, WORDS, Stub, serving
from tests.worker.harness import (
    PATIENCE_S,
    QueueClient,
    WorkerProcess,
    eventually,
    get,
    process_settings,
    running_worker,
    worker_config,
)

MODEL = "echo"


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def url(stub: Stub) -> Iterator[str]:
    with serving(stub) as url:
        yield url


def endpoint_config(client: QueueClient, url: str, **settings: object) -> WorkerConfig:
    given = {"engine_url": url, "served_model_name": MODEL, "model": None, "checkpoint_s": 0.05}
    return worker_config(client.url, client.queue, **(given | settings))


@pytest.mark.slow
def test_a_prompt_and_a_chat_are_answered(client: QueueClient, stub: Stub, url: str) -> None:
    with running_worker(endpoint_config(client, url)):
        ids = client.submit(
            {"prompt": "begin", "max_tokens": 5, "seed": 3, "top_k": 4},
            {"messages": [{"role": "user", "content": "begin"}]},
            {"prompt": "begin", "max_tokens": 2, "n": 3},
        )
        prompt, chat, samples = client.results(ids)
    assert (prompt.text, prompt.outputs[0].finish_reason) == ("".join(WORDS[:5]), "length")
    assert (prompt.usage.prompt_tokens, prompt.usage.completion_tokens, prompt.tier) == (7, 5, "continues")
    assert (chat.text, chat.outputs[0].finish_reason) == (TEXT, "stop")
    assert [output.text for output in samples.outputs] == ["".join(WORDS[:2])] * 3
    sent = next(body for body in stub.bodies if body.get("seed") == 3)
    assert (sent["top_k"], sent["cache_salt"], sent["model"]) == (4, "default", "stub-model")


@pytest.mark.slow
def test_a_cancelled_job_closes_its_stream(client: QueueClient, stub: Stub, url: str) -> None:
    stub.delay_s = 0.02
    with running_worker(endpoint_config(client, url)):
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 200, "stream": True})
        eventually(lambda: 0 < client.generated(job_id) < 190, "a part of the output")
        client.cancel(job_id)
        (outcome,) = client.wait([job_id])
        assert outcome.state == "cancelled"
        eventually(lambda: stub.num_running == 0, "the stream to be closed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "counts_attempt"),
    [
        ("truncated", False), ("reset", False), ("hanging", False), ("trickle", False), ("invalid", True),
        ("wrong_types", True), ("error_event", True), ("huge_line", True),
    ],
)  # fmt: skip
def test_a_broken_stream_is_continued(
    client: QueueClient, stub: Stub, url: str, fault: str, counts_attempt: bool
) -> None:
    stub.fault, stub.num_faults, stub.fault_after = fault, 1, 20
    with running_worker(endpoint_config(client, url, engine_stall_s=1.0)) as worker:
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 200})
        result = client.result(job_id)
        assert worker.counters.commits.read()["fenced"] == 0
    assert result.text == TEXT
    assert (result.attempt, result.resumed_tokens) == (2 if counts_attempt else 1, 20)
    assert client.status(job_id).crashes == 0, "it made progress"
    assert [WORDS[19] in body["prompt"] for body in stub.bodies] == [False, True]
    assert stub.bodies[1]["max_tokens"] == 180


@pytest.mark.slow
def test_a_job_that_always_ends_the_connection_is_buried(client: QueueClient, stub: Stub, url: str) -> None:
    stub.fault, stub.fault_after = "reset", 0
    with running_worker(endpoint_config(client, url)):
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 5})
        (outcome,) = client.wait([job_id])
    assert outcome.error is not None
    assert (outcome.state, outcome.error.code) == ("dead", "crash_suspect")


@pytest.mark.slow
def test_an_endless_stream_is_cut_off(client: QueueClient, stub: Stub, url: str) -> None:
    stub.fault, stub.fault_after = "endless", -1
    with running_worker(endpoint_config(client, url)):
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 5, "max_attempts": 2})
        (outcome,) = client.wait([job_id])
        assert outcome.state == "dead"
        eventually(lambda: stub.num_running == 0, "the streams to be closed")


@pytest.mark.slow
@pytest.mark.parametrize(("status", "attempt"), [(429, 1), (503, 1), (500, 2)])
def test_an_endpoint_that_answers_with_an_error_gets_the_job_again(
    client: QueueClient, stub: Stub, url: str, status: int, attempt: int
) -> None:
    stub.status, stub.num_faults = status, 1
    stub.fault = "none"
    with running_worker(endpoint_config(client, url)):
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 5})
        eventually(lambda: stub.num_faults <= 0, "the error")
        result = client.result(job_id)
    assert (result.text, result.attempt) == ("".join(WORDS[:5]), attempt)


@pytest.mark.slow
def test_a_request_that_the_endpoint_rejects_fails_alone(client: QueueClient, stub: Stub, url: str) -> None:
    stub.status, stub.num_faults = 400, 1
    with running_worker(endpoint_config(client, url)):
        (bad,) = client.submit({"prompt": "a private prompt", "max_tokens": 5})
        error = client.wait([bad])[0].error
        (good,) = client.submit({"prompt": "begin", "max_tokens": 5})
        assert client.wait([good])[0].state == "succeeded"
    assert error is not None
    assert error.code == "invalid_job"
    assert "some_code" in error.message
    assert "private" not in error.message


@pytest.mark.slow
def test_a_worker_waits_for_an_endpoint_that_is_down(client: QueueClient, stub: Stub) -> None:
    with serving(Stub()) as url:
        port = int(url.split(":")[2].split("/")[0])
    config = endpoint_config(client, url)
    worker = Worker(config, client.url)
    worker.start()
    try:
        assert not worker.wait_ready(timeout=1.0)
        with serving(stub, port):
            assert worker.wait_ready(timeout=PATIENCE_S)
            (first,) = client.submit({"prompt": "begin", "max_tokens": 5})
            assert client.wait([first])[0].state == "succeeded"
        eventually(lambda: worker.engine.state is EngineState.LOADING, "the worker to notice")
        (second,) = client.submit({"prompt": "begin", "max_tokens": 5})
        eventually(lambda: worker.admission.blocked == "loading", "the worker to wait")
        assert client.status(second).state == "queued"
        assert worker.failure() is None
        with serving(Stub(), port):
            result = client.result(second)
            assert (result.text, result.attempt) == ("".join(WORDS[:5]), 1)
    finally:
        worker.drain(0.0, SignalFlag(), time.monotonic() + 60)
        assert worker.close()


@pytest.mark.slow
def test_jobs_in_flight_survive_the_end_of_the_endpoint(client: QueueClient, stub: Stub) -> None:
    stub.delay_s = 0.02
    with serving(stub) as url:
        port = int(url.split(":")[2].split("/")[0])
        config = endpoint_config(client, url)
        worker = Worker(config, client.url)
        worker.start()
        assert worker.wait_ready(timeout=PATIENCE_S)
        ids = client.submit(*({"prompt": "begin", "max_tokens": 200} for _ in range(4)))
        eventually(lambda: all(client.generated(job_id) > 10 for job_id in ids), "all to generate")
    try:
        eventually(
            lambda: all(client.status(job_id).state == "queued" for job_id in ids), "the jobs to be back"
        )
        with serving(Stub(), port):
            results = client.results(ids)
        assert all(result.text == TEXT for result in results)
        assert all(result.resumed_tokens > 10 for result in results)
        assert worker.counters.commits.read()["fenced"] == 0
    finally:
        worker.drain(0.0, SignalFlag(), time.monotonic() + 60)
        assert worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["model", "version", "answer"])
def test_another_model_at_the_endpoint_is_a_lost_device(
    client: QueueClient, stub: Stub, url: str, change: str
) -> None:
    stub.delay_s = 0.02
    worker = Worker(endpoint_config(client, url), client.url)
    worker.start()
    try:
        assert worker.wait_ready(timeout=PATIENCE_S)
        before = worker.engine.engine.fingerprint
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 200})
        eventually(lambda: client.generated(job_id) > 5, "the job to run")
        if change == "model":
            stub.model = "another"
        elif change == "version":
            stub.version = "2.0"
        else:
            stub.answers_as = "another"
        eventually(lambda: worker.failure() is not None, "the worker to fail")
        assert isinstance(worker.engine.error, DeviceLost)
        worker.abandon()
        assert client.status(job_id).state == "queued"
        assert client.status(job_id).crashes == 0
    finally:
        worker.close()
    stub.answers_as = None
    with running_worker(endpoint_config(client, url)) as other:
        assert (other.engine.engine.fingerprint == before) == (change == "answer")
        result = client.result(job_id)
    assert result.text == TEXT
    assert (result.resumed_tokens > 0) == (change == "answer"), "another model does not continue the text"


@pytest.mark.slow
def test_what_an_endpoint_cannot_do_is_left_to_other_workers(
    client: QueueClient, stub: Stub, url: str
) -> None:
    stub.honors_schemas, stub.owned_by = False, "unknown"
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    jobs: list[dict[str, object]] = [
        {"prompt": "a text", "task": "score"},
        {"prompt": "a text", "label_probs": "product"} | choice,
        {"prompt": "a text", "logprobs": 1},
        {"prompt": "a text", "max_tokens": 8} | choice,
        {"prompt": "a text", "best_of": 2},
        {"prompt": "a text", "top_k": 2},
        {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "low"},
    ]
    with running_worker(endpoint_config(client, url)) as worker:
        ids = client.submit(*jobs)
        (plain,) = client.submit({"prompt": "begin", "max_tokens": 5})

        def num_set_apart() -> int:
            return sum(jobs for lane, jobs in client.stats().lanes.items() if "+" in lane)

        eventually(lambda: num_set_apart() == len(jobs), "the jobs to be released")
        assert client.wait([plain])[0].state == "succeeded"
        time.sleep(1.0)
        assert worker.counters.jobs_received.read()["first"] == len(jobs) + 1, "none is pulled again"
        assert {client.status(job_id).state for job_id in ids} == {"queued"}
        with running_worker(worker_config(client.url, client.queue)) as able:
            assert [outcome.state for outcome in client.wait(ids)] == ["succeeded"] * len(jobs)
            assert {client.status(job_id).worker for job_id in ids} == {able.worker_id}


@pytest.mark.slow
def test_schemas_and_adapters_where_the_endpoint_has_them(client: QueueClient, stub: Stub, url: str) -> None:
    with running_worker(endpoint_config(client, url)) as worker:
        schema = {"structured_outputs": {"json": {"type": "object"}}}
        choice = {"structured_outputs": {"choice": ["yes", "no"]}}
        ids = client.submit(*({"prompt": "begin", "max_tokens": 5} | shape for shape in (schema, choice)))
        assert [outcome.state for outcome in client.wait(ids)] == ["succeeded"] * 2
        assert not {"json", "structure", "sampling"} & worker.engine.engine.lacks
    sent = [body for body in stub.bodies if "response_format" in body or "structured_outputs" in body]
    assert sorted(sent[0].keys() ^ sent[1].keys()) == ["response_format", "structured_outputs"]


@pytest.mark.slow
def test_an_endpoint_without_completions_answers_chats(client: QueueClient, stub: Stub, url: str) -> None:
    stub.has_completions = False
    with running_worker(endpoint_config(client, url)) as worker:
        assert {"prompt", "tokens"} <= worker.engine.engine.lacks
        (chat,) = client.submit({"messages": [{"role": "user", "content": "begin"}]})
        assert client.wait([chat])[0].state == "succeeded"


@pytest.mark.slow
def test_a_chat_is_continued_where_the_engine_can(client: QueueClient, stub: Stub, url: str) -> None:
    stub.fault, stub.num_faults, stub.fault_after = "truncated", 1, 20
    with running_worker(endpoint_config(client, url)):
        (job_id,) = client.submit({"messages": [{"role": "user", "content": "begin"}]})
        result = client.result(job_id)
    assert (result.text, result.resumed_tokens) == (TEXT, 20)
    assert stub.bodies[1]["continue_final_message"] is True
    assert stub.bodies[1]["messages"][-1] == {"role": "assistant", "content": "".join(WORDS[:20])}


@pytest.mark.slow
def test_a_chat_starts_over_where_it_cannot(client: QueueClient, stub: Stub, url: str) -> None:
    stub.owned_by = "unknown"
    stub.fault, stub.num_faults, stub.fault_after = "truncated", 1, 20
    with running_worker(endpoint_config(client, url)):
        (job_id,) = client.submit({"messages": [{"role": "user", "content": "begin"}]})
        result = client.result(job_id)
    assert (result.text, result.resumed_tokens) == (TEXT, 0)


@pytest.mark.slow
def test_a_worker_with_the_tokenizer_sends_token_ids(
    client: QueueClient, stub: Stub, url: str, tmp_path: Path
) -> None:
    tokenizer = ByteTokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    stub.fault, stub.num_faults, stub.fault_after = "truncated", 1, 20
    with running_worker(endpoint_config(client, url, model=str(tmp_path))):
        (job_id,) = client.submit({"messages": [{"role": "user", "content": "begin"}], "max_tokens": 30})
        result = client.result(job_id)
        (parsed,) = client.submit(
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 3,
                "chat_template_kwargs": {"a": 1},
            }
        )
        assert client.wait([parsed])[0].state == "succeeded"
    assert (result.resumed_tokens, result.usage.prompt_tokens) == (20, len("<begin>"))
    assert [tokenizer.decode(body["prompt"]) for body in stub.bodies] == [
        "<begin>",
        "<begin>" + "".join(WORDS[:20]),
        "<x>",
    ]


METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} RUNNING
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:cache_config_info{{block_size="16",num_gpu_blocks="1000"}} 1.0
vllm:prefix_cache_queries_total{{engine="0"}} 40
vllm:prefix_cache_hits_total{{engine="0"}} 30
"""


@pytest.mark.slow
def test_pulls_stop_while_the_engine_has_a_backlog(client: QueueClient, stub: Stub, url: str) -> None:
    stub.delay_s, stub.metrics = 0.01, METRICS.format(waiting=2)
    with running_worker(endpoint_config(client, url, max_num_seqs=8)) as worker:
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 5})
        eventually(lambda: worker.admission.blocked == "rows", "the worker to see the backlog")
        assert client.status(job_id).state == "queued"
        stub.metrics = METRICS.format(waiting=0)
        assert client.wait([job_id])[0].state == "succeeded"
        ids = client.submit(*({"prompt": "begin", "max_tokens": n} for n in range(60, 180, 10)))
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}
    assert stub.most_running <= 7, "three of eight rows are others', and two jobs may be at their last token"


@pytest.mark.slow
def test_kv_metrics_are_exported_where_the_engine_has_them(client: QueueClient, stub: Stub, url: str) -> None:
    with running_worker(endpoint_config(client, url)) as worker:
        text = get(f"{worker.http_url}/metrics")[1].decode()
        assert not re.search(r"^pagemill_kv_cache_(?!accounting)", text, re.MULTILINE), (
            "unknown is absent, not 0"
        )
        stub.metrics = METRICS.format(waiting=0)

        def figure(name: str) -> str | None:
            text = get(f"{worker.http_url}/metrics")[1].decode()
            found = re.search(rf"^pagemill_{name} (\S+)$", text, re.MULTILINE)
            return found and found[1]

        eventually(lambda: figure("kv_cache_utilization_ratio") == "0.25", "the use of the KV cache")
        assert figure("kv_cache_capacity_blocks") == "1000.0"
        assert figure("prefix_cache_hit_tokens_total") == "30.0"
        assert figure("kv_cache_block_evictions_total") is None


@pytest.mark.slow
def test_slots_limit_pulls(client: QueueClient, stub: Stub, url: str) -> None:
    stub.owned_by, stub.slots, stub.delay_s = "llamacpp", [{"is_processing": False}] * 2, 0.01
    with running_worker(endpoint_config(client, url)):
        ids = client.submit(*({"prompt": "begin", "max_tokens": 20} for _ in range(12)))
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}
    assert stub.most_running <= 4, "two, and two more while the first are at their last token"


@pytest.mark.slow
def test_the_key_is_sent_and_appears_nowhere(
    client: QueueClient, stub: Stub, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub.key = KEY
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    stub.status, stub.num_faults = 400, 1
    caplog.set_level("DEBUG")
    with running_worker(endpoint_config(client, url, engine_key_file=str(file))) as worker:
        (bad,) = client.submit({"prompt": "begin", "max_tokens": 5})
        outcome = client.wait([bad])[0]
        (good,) = client.submit({"prompt": "begin", "max_tokens": 5})
        assert client.wait([good])[0].state == "succeeded"
        pages = [get(f"{worker.http_url}/{page}")[1].decode() for page in ("metrics", "readyz", "healthz")]
        told = [repr(outcome), repr(client.workers()), repr(worker.config), caplog.text, *pages]
    assert not any(KEY in text for text in told)


@pytest.mark.slow
def test_a_wrong_key_is_waited_for(client: QueueClient, stub: Stub, url: str) -> None:
    stub.key = KEY
    worker = Worker(endpoint_config(client, url), client.url)
    worker.start()
    try:
        assert not worker.wait_ready(timeout=1.0)
        stub.key = ""
        assert worker.wait_ready(timeout=PATIENCE_S)
    finally:
        worker.drain(0.0, SignalFlag(), time.monotonic() + 60)
        worker.close()


@pytest.mark.parametrize(
    ("setting", "value", "mistake"),
    [
        ("more_models", ["a", "b"], "none of echo, but stub-model, a, b"),
        ("rejects", "stream_options", "HTTP 400, unknown_field"),
    ],
)
def test_an_endpoint_with_other_models_or_that_rejects_every_job_is_a_mistake(
    client: QueueClient, stub: Stub, url: str, setting: str, value: object, mistake: str
) -> None:
    setattr(stub, setting, value)
    worker = Worker(endpoint_config(client, url), client.url)
    worker.start()
    with pytest.raises(ConfigError, match=mistake):
        worker.wait_ready(timeout=PATIENCE_S)
    worker.close()


@pytest.mark.slow
def test_both_may_be_killed(client: QueueClient, tmp_path: Path) -> None:
    """SIGKILL of the endpoint, then of the worker: the text continues, and is committed once."""
    with serving(Stub()) as url:
        port = url.split(":")[2].split("/")[0]

    def start_stub() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", stub_module.__name__, port], cwd=Path.cwd())

    settings = process_settings(
        client.url, client.queue, engine_url=url, served_model_name=MODEL, model=None, checkpoint_s=0.05
    )
    stub = start_stub()
    worker = WorkerProcess(settings, tmp_path / "worker.log")
    try:
        (job_id,) = client.submit({"prompt": "begin", "max_tokens": 200})
        eventually(lambda: client.generated(job_id) >= 10, "a part of the output")
        stub.kill()
        stub.wait(PATIENCE_S)
        eventually(lambda: client.status(job_id).state == "queued", "the job to be back")
        stub = start_stub()
        eventually(lambda: client.generated(job_id) >= 40, "more of the output")
        worker.kill()
        worker = WorkerProcess(settings, tmp_path / "worker.log")
        result = client.result(job_id)
    finally:
        worker.kill()
        stub.kill()
        stub.wait(PATIENCE_S)
    assert (result.text, result.attempt) == (TEXT, 1)
    assert result.resumed_tokens >= 40

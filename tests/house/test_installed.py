"""The wheel in a separate environment, used in a folder whose files have former names of Pagemill's folders."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_help import COMMANDS
from tests.engine.tiny_model import save_tiny_llama
from tests.house.environment import Environment

THEIRS = {
    "producer.py": "raise ImportError('their producer')",
    "engine.py": "OWNER = 'them'",
    "monitoring.py": "raise ImportError('their monitoring')",
    "kernels/__init__.py": "",
    "kernels/noise.py": "raise ImportError('their kernels')",
    "worker/tasks.py": """
import os
from celery import Celery
import engine
app = Celery("shop", broker=os.environ["PAGEMILL_REDIS_URL"], backend=os.environ["PAGEMILL_REDIS_URL"])

@app.task(name="shop.owner")
def owner():
    return engine.OWNER
""",
}

SUBMIT = """
from pagemill import InvalidJob, Job, Producer, StructuredOutputs
with Producer() as queue:
    job = Job(prompt="1234", model="echo", max_tokens=8, structured_outputs=StructuredOutputs(regex="[0-9]{4}"))
    print(queue.submit(job).result(timeout=120).text)
    try:
        queue.submit(prompt="a", model="echo", temperature=-1)
    except InvalidJob as error:
        print("refused")
"""

GENERATE = """
import sys
from pagemill import LLM, SamplingParams
sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4, ignore_eos=True)
llm = LLM(model=sys.argv[1], tensor_parallel_size=2, num_kv_blocks=64, num_threads=1, dtype="bfloat16")
(output,) = llm.generate([[5, 6, 7]], sampling)
print(len(output.outputs[0].token_ids))
llm.close()
"""

HELP = """
import json, sys
from typer.testing import CliRunner
from pagemill.__main__ import app
failed = []
for path in json.loads(sys.argv[1]):
    shown = CliRunner().invoke(app, [*path, "--help"], prog_name="pagemill")
    if shown.exit_code != 0 or "Usage: pagemill" not in shown.output:
        failed.append([*path, shown.output])
print(json.dumps(failed))
"""

CELERY = """
from celery import Celery
import os
app = Celery("client", broker=os.environ["PAGEMILL_REDIS_URL"], backend=os.environ["PAGEMILL_REDIS_URL"])
send = lambda name, **fields: app.send_task(name, kwargs=fields, queue="pagemill").get(timeout=120)
print(send("pagemill.generate", prompt="hello", max_tokens=9)["text"], send("shop.owner"))
"""


@pytest.fixture(scope="module")
def shop(wheel: Path, valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with pagemill's dependencies from this one, but not pagemill itself."""
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("shop")
    shop = Environment(environment, folder, valkey_url)
    shop.pip("install", "-q", "--no-deps", str(wheel))
    purelib = shop.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Folders named in a .pth file are searched, their own .pth files are not read: the editable install is excluded.
    Path(purelib, "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, text in THEIRS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    where = shop.python("import pagemill.engine; print(pagemill.engine.__file__)")
    assert where.startswith(str(environment))
    return shop


@pytest.fixture(scope="module")
def worker(shop: Environment) -> Iterator[None]:
    with shop.service(
        "python", "-m", "pagemill", "worker", "--model", "echo", "--http-port", "0", until="ready"
    ):
        yield


@pytest.mark.slow
def test_every_command_has_its_help(shop: Environment) -> None:
    """Including the groups' lists. One process runs them all, since each process takes seconds to start."""
    assert "Usage: pagemill" in shop.run("pagemill", "--help")
    paths = [list(path) for path, _ in COMMANDS.values()]
    failed = json.loads(shop.python(HELP, json.dumps(paths)))
    assert failed == []


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_a_submit_and_a_grammar(shop: Environment) -> None:
    text, refused = shop.python(SUBMIT).split()
    assert text.isdigit()
    assert len(text) == 4
    assert refused == "refused"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_the_commands_on_a_queue(shop: Environment) -> None:
    job_id = shop.run("pagemill", "submit", "hello").strip()
    assert shop.run("pagemill", "result", job_id).strip() == "hello"
    for command in ("status", "inspect"):
        assert json.loads(shop.run("pagemill", command, job_id, "--json"))["state"] == "succeeded"
    assert "echo" in shop.run("pagemill", "workers")
    for command in (("queue", "stats"), ("dead", "list"), ("doctor",), ("top", "--once")):
        shop.run("pagemill", *command)
    (shop.folder / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    shop.run(
        "pagemill", "run", "rows.jsonl", "--out", "out.jsonl", "--template", "{{ text }}", "--model", "echo"
    )
    outputs = [
        json.loads(line)["output"].strip() for line in (shop.folder / "out.jsonl").read_text().splitlines()
    ]
    assert outputs == ["a", "b"]


@pytest.mark.slow
def test_a_model_on_two_ranks(shop: Environment, tmp_path: Path) -> None:
    """In half precision, for which few kernels are compiled: its results are tested by the engine's own tests."""
    save_tiny_llama(tmp_path)
    assert shop.python(GENERATE, str(tmp_path)) == "4\n"


@pytest.mark.slow
def test_a_celery_app_of_their_own(shop: Environment) -> None:
    command = ("pagemill", "celery-worker", "--model", "echo", "--celery-app", "worker.tasks:app")
    with shop.service(*command, until=" ready."):
        assert shop.python(CELERY).split() == ["hello", "them"]

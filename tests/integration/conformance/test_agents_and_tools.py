"""Clients with less common requests: each runs unchanged against the gateway, in a separate environment."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conformance.environments import outside, python_with
from tests.producer.gateway.serving import Served, served_worker

MODEL = "smollm2"
# torch is named with its build: the default build needs gigabytes.
GUIDELLM = ("guidellm==0.8.1", "torch==2.13.0")
LITELLM = ("litellm==1.110.2", "fastapi", "orjson", "soundfile")
"""The last three import it for a stream of messages."""
OUTLINES = ("outlines==1.3.3", "openai==3.57.0")
SEMANTIC_KERNEL = ("semantic-kernel==1.45.0", "protobuf")
AGENTS = Path(__file__).with_name("script_semantic_kernel.py")
PROMPTS = 6

GENERATE = """
import json, sys
from typing import Literal
import openai, outlines
from outlines.types import CFG, Regex

model = outlines.from_vllm(openai.OpenAI(base_url=sys.argv[1], api_key="none"), sys.argv[2])
grammar = CFG('''
?start: sum
?sum: NUMBER | sum "+" NUMBER
NUMBER: /[0-9]{1,3}/
''')
found = [model("A sum:", kind, max_tokens=12) for kind in (grammar, Regex("[0-9]{3}"), Literal["yes", "no"])]
print(json.dumps([*found, "".join(model.stream("A sum:", grammar, max_tokens=12))]))
"""
MESSAGES = """
import asyncio, json, sys
import litellm

async def main():
    ask = {"model": f"openai/{sys.argv[2]}", "api_base": sys.argv[1], "api_key": "none", "max_tokens": 16,
           "messages": [{"role": "user", "content": "Name a color."}]}
    whole = await litellm.anthropic.messages.acreate(**ask)
    events = b"".join([event async for event in await litellm.anthropic.messages.acreate(**ask, stream=True)])
    print(json.dumps([whole, events.decode()]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def served(valkey_url: str) -> Iterator[Served]:
    with served_worker(valkey_url, model=MODEL, kv_cache_memory_bytes=256 << 20) as served:
        yield served


def run(command: list[str | Path], folder: Path, **more: str) -> str:
    done = subprocess.run(
        command, env=outside() | more, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-5_000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(url: str, served: Served, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    python = python_with(pytestconfig, *GUIDELLM)
    rows = [{"prompt": f"Name number {n}.", "output_tokens_count": 5} for n in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(
        [python.with_name("guidellm"), "run", "--disable-progress",
         "--backend", f"kind=openai_http,target={served.url},model={MODEL},request_format={url}",
         "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={PROMPTS}",
         "--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=report.json"],
        tmp_path, HF_HOME=str(tmp_path / "hub"),
    )  # fmt: skip
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = report["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (PROMPTS, 0)
    assert [one["output_metrics"]["text_tokens"] for one in report["requests"]["successful"]] == [5] * PROMPTS


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_agents_of_semantic_kernel(served: Served, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    python = python_with(pytestconfig, *SEMANTIC_KERNEL)
    spoken = json.loads(run([python, AGENTS, served.base_url, MODEL], tmp_path))
    assert [name for name, _ in spoken] == ["writer", "writer", "writer", "critic", "writer"]
    assert all(length for _, length in spoken)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_grammars_of_outlines(served: Served, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    python = python_with(pytestconfig, *OUTLINES)
    total, number, answer, streamed = json.loads(
        run([python, "-c", GENERATE, served.base_url, MODEL], tmp_path)
    )
    for text in (total, streamed):
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*\+?", text)  # the sum may be cut
    assert re.fullmatch(r"\d{3}", number)
    assert answer in ("yes", "no")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_messages_of_litellm(served: Served, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    python = python_with(pytestconfig, *LITELLM)
    out = run([python, "-c", MESSAGES, served.base_url, MODEL], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    whole, events = json.loads(out)
    assert whole["content"][0]["text"]
    assert 0 < whole["usage"]["output_tokens"] <= 16
    assert events.count("event: content_block_delta") > 0
    assert events.rstrip().endswith('data: {"type": "message_stop"}')

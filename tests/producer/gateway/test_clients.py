"""Tool use with popular client libraries: langchain here, instructor and litellm in the slow set.

instructor requires an older jiter and rich than the other tests have, and litellm has many dependencies that
are not needed here: they are the extra `clients`, which `make setup` omits. `INSTALL` installs them without
their other dependencies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.producer.gateway.serving import Served, served_worker
from tests.worker.harness import PATIENCE_S

INSTALL = (
    "pip install --no-deps instructor docstring-parser "
    "standardwebhooks litellm fastuuid 'importlib-metadata<9' zipp h2 hpack hyperframe"
)
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Weather(BaseModel):
    """Say what the weather is like."""

    model_config = ConfigDict(extra="forbid")  # with more members allowed, echo would write them forever

    city: Literal["Rome", "Oslo"]


@pytest.fixture(scope="module")
def served(valkey_url: str) -> Iterator[Served]:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    with served_worker(valkey_url, model="echo", **parsers) as served:
        yield served


@pytest.fixture
def langchain_model(served: Served) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="echo",
        base_url=served.base_url,
        api_key="none",
        temperature=0.0,
        max_retries=0,
        timeout=PATIENCE_S,
    )  # type: ignore[call-arg]


def test_langchain_binds_tools(langchain_model: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain_model.bind_tools([Weather])
    answer = bound.invoke(f"I look. {CALL}")
    assert answer.content == "I look."
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("Weather", {"city": "Rome"})
    turns = [HumanMessage("and?"), answer, ToolMessage("sun", tool_call_id=call["id"])]
    assert langchain_model.invoke(turns).content == "and?\nI look.\nsun\n"
    streamed = None
    for chunk in bound.stream(CALL):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [one["args"] for one in streamed.tool_calls] == [{"city": "Rome"}]


@pytest.mark.parametrize("choice", ["required", "Weather"])
def test_langchain_forces_calls(langchain_model: Any, choice: str) -> None:
    bound = langchain_model.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    (call,) = bound.invoke("words").tool_calls
    Weather.model_validate(call["args"])


@pytest.mark.slow
def test_langchain_s_structured_output(langchain_model: Any) -> None:
    for method in ("function_calling", "json_schema"):
        found = langchain_model.with_structured_output(Weather, method=method).invoke("words")
        assert isinstance(found, Weather)


@pytest.mark.slow
def test_instructor_s_tools_mode(served: Served) -> None:
    instructor = pytest.importorskip("instructor", reason=f"instructor is not installed: {INSTALL}")
    from openai import OpenAI

    client = instructor.from_openai(
        OpenAI(base_url=served.base_url, api_key="none"), mode=instructor.Mode.TOOLS
    )
    found = client.chat.completions.create(
        model="echo", response_model=Weather, messages=[{"role": "user", "content": "words"}], max_retries=0
    )
    assert isinstance(found, Weather)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of its own types
@pytest.mark.parametrize("is_stream", [False, True])
def test_litellm_reads_calls_and_thinking(
    served: Served, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it sends requests to the internet
    litellm = pytest.importorskip("litellm", reason=f"litellm is not installed: {INSTALL}")

    ask: dict[str, Any] = {
        "model": "openai/echo",
        "api_base": served.base_url,
        "api_key": "none",
        "temperature": 0.0,
        "messages": [{"role": "user", "content": f"<think>Hm.</think>{CALL}"}],
        "tools": [{"type": "function", "function": {"name": "Weather"}}],
    }
    answer = litellm.completion(**ask, stream=is_stream)
    if is_stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    assert message.reasoning_content == "Hm."
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("Weather", {"city": "Rome"})
    assert answer.choices[0].finish_reason == "tool_calls"

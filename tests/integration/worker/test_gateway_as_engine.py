"""Pagemill's own gateway as the endpoint of a worker: the same text as from the gateway directly."""

from __future__ import annotations

import uuid

import pytest
from openai import OpenAI

from tests.producer.gateway.serving import gateway
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

QUESTION = "Name three colors of the rainbow."


@pytest.mark.slow
@pytest.mark.parametrize("model", ["echo", "smollm2"])
def test_chats_and_prompts_are_the_same_text_as_directly(client: QueueClient, model: str) -> None:
    behind = f"q-{uuid.uuid4().hex[:12]}"
    settings = {"max_model_len": 512, "max_num_seqs": 4, "lease_s": 60.0}
    messages = [{"role": "user", "content": QUESTION}]
    limits = {"max_tokens": 12, "temperature": 0.0}
    schema = {
        "structured_outputs": {"json": {"type": "object", "properties": {}, "additionalProperties": False}}
    }
    with (
        running_worker(worker_config(client.url, behind, model=model, **settings), 3 * PATIENCE_S) as engine,
        gateway(client.url, behind) as served,
    ):
        served.wait_for(engine.model)
        with OpenAI(base_url=served.base_url, api_key="none", timeout=PATIENCE_S) as openai:
            chat = openai.chat.completions.create(model=engine.model, messages=messages, **limits)  # type: ignore[call-overload]
            prompt = openai.completions.create(model=engine.model, prompt=QUESTION, **limits)  # type: ignore[call-overload]
        config = worker_config(
            client.url,
            client.queue,
            engine_url=served.base_url,
            served_model_name=engine.model,
            model=None,
            lease_s=60.0,
        )
        with running_worker(config, 3 * PATIENCE_S) as worker:
            assert worker.engine.engine.identity.dialect.name == "pagemill"  # type: ignore[attr-defined]
            assert (
                not {"prompt", "chat", "tokens", "json", "structure", "sampling"} & worker.engine.engine.lacks
            )
            asked = [{"messages": messages}, {"prompt": QUESTION}, {"prompt": QUESTION, "stream": True}]
            ids = client.submit(*({"model": engine.model} | job | limits for job in asked))
            (shaped,) = client.submit({"model": engine.model, "prompt": QUESTION, "max_tokens": 32} | schema)
            results = [outcome.value() for outcome in client.wait([*ids, shaped], 3 * PATIENCE_S)]
            eventually(lambda: not worker.table.running(), "the end of all jobs")
    texts = [result.text for result in results if result is not None]
    said = prompt.choices[0].text
    assert texts[:3] == [chat.choices[0].message.content, said, said]
    assert results[3] is not None
    assert results[3].outputs[0].parsed == {}
    assert results[1] is not None
    assert results[1].usage.completion_tokens == prompt.usage.completion_tokens
    assert results[1].usage.prompt_tokens == prompt.usage.prompt_tokens

"""Chat completions with `store: true`, as the openai package requests them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from pagemill import Producer
from pagemill.producer.gateway import stored_chats
from tests.producer.driving import open_queue
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.harness import PATIENCE_S

CHAT: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": "hello there"}],
    "max_tokens": 8,
    "n": 2,
    "seed": 1,
    "logprobs": True,
}


def test_a_stored_chat_from_creation_to_deletion(client: OpenAI) -> None:
    made = client.chat.completions.create(**CHAT, store=True, metadata={"row": "7"})
    found = client.chat.completions.retrieve(made.id)
    assert found.metadata == {"row": "7"}  # type: ignore[attr-defined]
    for name in ("id", "model", "choices", "usage", "system_fingerprint"):
        assert getattr(found, name) == getattr(made, name), name
    chunks = list(client.chat.completions.create(**CHAT, store=True, stream=True))
    assert client.chat.completions.retrieve(chunks[0].id).choices == made.choices
    deleted = client.chat.completions.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for gone in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)


def test_what_was_not_stored_is_not_found(client: OpenAI, valkey_url: str, queue: str) -> None:
    plain = client.chat.completions.create(**CHAT, metadata={"row": "7"})
    response = client.responses.create(model="echo", input="x", store=True)
    with Producer(valkey_url, queue=queue) as producer:
        running = producer.submit(model="nobody", prompt="x", metadata={"chat": {"model": "nobody"}})
        names = [plain.id, response.id.replace("resp_", "chatcmpl-"), f"chatcmpl-{running.id}"]
        for name in (*names, "chatcmpl-", "chatcmpl-*", "else"):
            with pytest.raises(openai.NotFoundError) as missing:
                client.chat.completions.retrieve(name)
            assert missing.value.code == "completion_not_found"
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.chat.completions.create(**CHAT, store=True, metadata={"a": "x" * 20_000})


def test_another_tenant_and_another_model_s_key_see_nothing(
    valkey_url: str, queue: str, served: Served, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    keys = write_keys(
        path, own={"tenant": "shop"}, same={"tenant": "shop", "models": ["else"]}, other={"tenant": "other"}
    )
    with gateway(valkey_url, queue, keys_path=path) as held:

        def client_of(name: str) -> OpenAI:
            return OpenAI(base_url=held.base_url, api_key=keys[name], max_retries=0, timeout=PATIENCE_S)

        with client_of("own") as own, client_of("same") as same, client_of("other") as other:
            made = own.chat.completions.create(**CHAT, store=True)
            assert [chat.id for chat in own.chat.completions.list()] == [made.id]
            for client in (same, other):
                assert not list(client.chat.completions.list())
                for read in (client.chat.completions.messages.list, client.chat.completions.update):
                    with pytest.raises(openai.NotFoundError):
                        read(made.id, **({"metadata": {}} if read == client.chat.completions.update else {}))
                for action in (client.chat.completions.retrieve, client.chat.completions.delete):
                    with pytest.raises(openai.NotFoundError):
                        action(made.id)
            assert own.chat.completions.retrieve(made.id).id == made.id


def test_chats_are_listed_filtered_and_changed(client: OpenAI) -> None:
    chats = client.chat.completions
    before = {chat.id for chat in chats.list()}
    made = [chats.create(**CHAT, store=True, metadata={"row": str(i % 2)}).id for i in range(5)]
    chats.create(**CHAT)
    assert [chat.id for chat in chats.list(limit=2) if chat.id not in before] == made
    assert [chat.id for chat in chats.list(limit=2, order="desc")][:5] == made[::-1]
    first = chats.list(limit=2, metadata={"row": "1"}, model="echo")
    assert ([chat.id for chat in first], first.has_more) == ([made[1], made[3]], False)
    assert not list(chats.list(model="nobody"))
    assert first.data[0].choices == chats.retrieve(made[1]).choices
    changed = chats.update(made[1], metadata={"row": "9"})
    assert changed.metadata == chats.retrieve(made[1]).metadata == {"row": "9"}  # type: ignore[attr-defined]
    assert [chat.id for chat in chats.list(metadata={"row": "9"})] == [made[1]]
    assert chats.update(made[3], metadata=None).metadata is None  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="metadata"):
        chats.update(made[1], metadata={"row": "x" * 20_000})
    for chat in chats.list(limit=1):  # the page after a deleted one is found
        chats.delete(chat.id)
    assert not list(chats.list())


@pytest.mark.slow
def test_the_messages_of_a_chat_are_listed(client: OpenAI) -> None:
    asked = [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]
    made = client.chat.completions.create(**CHAT | {"messages": asked}, store=True)
    messages = client.chat.completions.messages
    found = list(messages.list(made.id, limit=1))
    assert [(message.role, message.content) for message in found] == [
        ("system", "Be brief."),
        ("user", "hello there"),
    ]
    assert [message.id for message in messages.list(made.id, order="desc")] == [m.id for m in found][::-1]
    with pytest.raises(openai.NotFoundError):
        messages.list("chatcmpl-else")


@pytest.mark.slow
def test_the_list_is_bounded_in_entries_and_bytes(
    valkey_url: str, queue: str, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [client.chat.completions.create(**CHAT, store=True).id for _ in range(3)]
    monkeypatch.setattr(stored_chats, "_MAX_PAGE_BYTES", 1)
    monkeypatch.setattr("pagemill.producer.wire.calls.gateway.stored_chats.LOOK_CHATS", 2)
    page = client.chat.completions.list(limit=50)
    assert (len(page.data), page.has_more) == (1, True)
    assert {*made} <= {chat.id for chat in page}
    opened = open_queue(valkey_url, queue)
    key, day_ago = f"{opened.prefix}chats:default", 1000 * time.time() - 86_400_000
    opened.client.zadd(key, {f"planted-{i}": day_ago + i for i in range(12_000)} | {"old": 1.0})
    last = client.chat.completions.create(**CHAT, store=True)
    assert opened.client.zcard(key) == 10_000
    assert opened.client.zscore(key, "old") is None
    assert opened.client.zscore(key, last.id.removeprefix("chatcmpl-"))
    assert 0 < opened.client.pttl(key) <= 8 * 86_400_000
    opened.transport.close()

"""Tokens of prompts: /tokenize, /detokenize, and log-probabilities as evaluations request them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI

from benchmarks.dense import dense_smollm2
from tests.producer.gateway.serving import Served, gateway, served_worker, write_keys
from tests.worker.harness import PATIENCE_S

TEXT = "The capital of France"
CHAT = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def post(served: Served, path: str, key: str = "none", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}/{path}", json=body, headers=headers, timeout=PATIENCE_S)


def harness_payload(model: str, prompts: list[list[int]]) -> dict[str, Any]:
    """The request of lm-evaluation-harness 0.4 for `local-completions` with tokenized requests."""
    return {
        "model": model, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip


def harness_scores(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """The values that it reads from the response: the sum over each continuation, and whether it is the greedy one."""
    found = []
    for choice, start in zip(
        sorted(answer["choices"], key=lambda one: one["index"]), context_lengths, strict=True
    ):
        logprobs = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        is_greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        found.append((sum(logprobs), is_greedy))
    return found


def test_tokens_of_a_text_and_back(served: Served) -> None:
    answer = post(served, "tokenize", prompt="h\u00e9", return_token_strs=True)
    assert answer.json() == {
        "count": 3,
        "max_model_len": answer.json()["max_model_len"],
        "tokens": [104, 195, 169],
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert answer.json()["max_model_len"] > 100
    bare = post(served, "tokenize", model="echo", prompt="h", add_special_tokens=False).json()
    assert (bare["tokens"], bare["token_strs"]) == ([104], None)
    assert post(served, "detokenize", model="echo", tokens=[104, 195, 169]).json() == {"prompt": "h\u00e9"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ("tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("tokenize", {"messages": CHAT, "continue_final_message": 1}, "continue_final_message"),
        (
            "tokenize",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("detokenize", {"prompt": "x"}, "tokens"),
        ("tokenize", {"prompt": "", "add_special_tokens": False}, "prompt"),
        ("detokenize", {"tokens": ["x"]}, "tokens.0"),
        ("detokenize", {"tokens": [1, -1]}, "tokens.1"),
        ("detokenize", {"tokens": []}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
        ("detokenize", {"tokens": [999_999]}, "tokens"),
    ],
)
def test_what_is_not_supported_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(served, path, model="echo", **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert "continuations" not in error["message"]


def test_keys_apply(valkey_url: str, queue: str, served: Served, tmp_path: Any) -> None:
    keys = write_keys(tmp_path / "keys.json", other={"models": ["else"]})
    with gateway(valkey_url, queue, keys_path=tmp_path / "keys.json") as held:
        assert post(held, "tokenize", model="echo", prompt="x").status_code == 401
        assert post(held, "detokenize", keys["other"], model="echo", tokens=[104]).status_code == 403


@pytest.mark.slow
def test_a_prompt_is_before_the_output(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "echo", "max_tokens": 2, "echo": True, "temperature": 0}
    plain = client.completions.create(prompt="ab", **ask).choices[0]
    assert (plain.text, plain.logprobs) == ("abab", None)
    ids = client.completions.create(prompt=[[97, 98], [99]], logprobs=1, n=2, seed=1, **ask)
    assert [(choice.index, choice.text[:2]) for choice in ids.choices] == [
        (0, "ab"),
        (1, "ab"),
        (2, "cc"),
        (3, "cc"),
    ]
    found = ids.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == "abab"
    assert found.text_offset == [0, 1, 2, 3]
    assert (found.token_logprobs or [])[0] is None
    scores = harness_scores(
        httpx.post(
            f"{client.base_url}completions", json=harness_payload("echo", [[97, 98, 99]]), timeout=PATIENCE_S
        ).json(),
        [1],
    )
    assert scores == [(pytest.approx(-0.02), True)]


@pytest.fixture(scope="module")
def real(valkey_url: str) -> Iterator[Served]:
    settings = {"model": "smollm2", "kv_cache_memory_bytes": 128 << 20, "num_threads": 1}
    with served_worker(valkey_url, load_patience_s=400, **settings) as served:
        yield served


@pytest.mark.slow
def test_scores_of_an_evaluation_are_the_model_s(real: Served) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(dense_smollm2())
    model = AutoModelForCausalLM.from_pretrained(dense_smollm2(), dtype=torch.float32).eval()
    pairs = [(TEXT + " is", end) for end in (" Paris", " London", " the city of Paris")]
    contexts = [tokenizer.encode(context) for context, _ in pairs]
    prompts = [
        context + tokenizer.encode(end, add_special_tokens=False)
        for context, (_, end) in zip(contexts, pairs, strict=True)
    ]
    answer = post(real, "v1/completions", **harness_payload("smollm2", prompts)).json()
    found = harness_scores(answer, [len(context) for context in contexts])
    for choice, (logprob, is_greedy), context, prompt in zip(
        answer["choices"], found, contexts, prompts, strict=True
    ):
        with torch.no_grad():
            rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        ends = range(len(context), len(prompt))
        assert logprob == pytest.approx(sum(rows[at - 1, prompt[at]].item() for at in ends), abs=1e-3)
        assert is_greedy == all(rows[at - 1].argmax() == prompt[at] for at in ends)
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
        assert choice["text"].startswith(tokenizer.decode(prompt))
    assert [is_greedy for _, is_greedy in found][:2] == [True, False]


@pytest.mark.slow
def test_tokens_are_the_tokenizer_s(real: Served) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(dense_smollm2())
    prompt = tokenizer.encode(TEXT)
    for is_special in (True, False):
        found = post(
            real, "tokenize", prompt=TEXT, add_special_tokens=is_special, return_token_strs=True
        ).json()
        assert (found["tokens"], found["count"]) == (prompt, len(prompt))
        assert "".join(found["token_strs"]) == TEXT
    assert post(real, "tokenize", prompt="The").json()["tokens"] == tokenizer.encode("The")
    assert post(real, "detokenize", tokens=prompt).json()["prompt"] == TEXT
    for is_asked in (True, False):
        expected = tokenizer.apply_chat_template(CHAT, return_dict=False, add_generation_prompt=is_asked)
        found = post(real, "tokenize", messages=CHAT, add_generation_prompt=is_asked).json()
        assert found["tokens"] == expected
    begun = [*CHAT, {"role": "assistant", "content": "The answer is"}]
    expected = tokenizer.apply_chat_template(begun, return_dict=False, continue_final_message=True)
    asked = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    assert post(real, "tokenize", **asked).json()["tokens"] == expected
    text = tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    greedy = {"model": "smollm2", "max_tokens": 8, "temperature": 0}
    chat = post(real, "v1/chat/completions", **asked, **greedy).json()["choices"][0]["message"]["content"]
    assert chat == post(real, "v1/completions", prompt=text, **greedy).json()["choices"][0]["text"]
    expected = tokenizer.apply_chat_template(CHAT, return_dict=False, add_generation_prompt=False)
    chat = {"model": "smollm2", "messages": CHAT, "tools": [TOOL]}
    usage = post(real, "v1/chat/completions", **chat, max_tokens=1).json()["usage"]
    assert post(real, "tokenize", **chat).json()["count"] == usage["prompt_tokens"] > len(expected)
    special = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert post(real, "detokenize", tokens=special).json()["prompt"] == "<|im_start|>user\nHi<|im_end|>"

"""The jobs whose bytes are kept: one per field, form and kind of prompt that the queue's v1 envelope has."""

from __future__ import annotations

import json
from typing import Any

QUEUE = "golden"
KEY = "a key of thirty-two bytes or more"
SIGNED_AT_S = 1_790_000_000.25
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TURNS = [
    {"role": "system", "content": "You label texts."},
    {"role": "user", "content": '“Grüße”, 你好, \U0001f600 and a\ttab \\ " \u2028'},
]

JOBS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "Once upon a time"},
    "unicode": {"prompt": "“Grüße”, 你好, \U0001f600 and a\ttab \\ \" \u2028\x7f"},
    "long prompt": {"prompt": "word " * 400},
    "chat": {"messages": TURNS},
    "one turn": {"messages": TURNS[1:], "max_tokens": 8},
    "token ids": {"prompt_token_ids": list(range(0, 400, 7)), "max_tokens": 4},
    "greedy": {"prompt": "a", "temperature": 0.0, "seed": 3},
    "sampled": {
        "prompt": "a", "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 2**63 - 1,
        "max_tokens": 64, "min_tokens": 2,
    },
    "a float that is whole": {"prompt": "a", "temperature": 2.0, "presence_penalty": -1.0},
    "penalties": {
        "prompt": "a", "presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.1,
    },
    "stops": {
        "prompt": "a", "stop": ["\n\n", "ende"], "stop_token_ids": [2, 0], "include_stop_str_in_output": True,
    },
    "one stop": {"prompt": "a", "stop": "ENDE", "ignore_eos": True, "skip_special_tokens": False},
    "tokens": {
        "prompt": "a", "logit_bias": {5: -100.0, 7: 1.5}, "allowed_token_ids": [5, 6, 7], "bad_words": ["x y", "z"],
    },
    "logprobs": {"prompt": "a", "logprobs": 3, "prompt_logprobs": 2, "truncate_prompt_tokens": 12},
    "samples": {"prompt": "a", "n": 3, "best_of": 5},
    "beams": {"prompt": "a", "n": 2, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"},
    "choice": {"prompt": "a", "structured_outputs": {"choice": ["yes", "no", "später"]}},
    "regex": {"prompt": "a", "structured_outputs": {"regex": "[0-9]{2,4}"}},
    "schema": {"messages": TURNS, "structured_outputs": {"json": SCHEMA}},
    "schema as text": {"prompt": "a", "structured_outputs": {"json": json.dumps(SCHEMA)}},
    "grammar": {"prompt": "a", "structured_outputs": {"grammar": 'start: "a" | "b"'}},
    "response format": {
        "prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "response object": {"prompt": "a", "response_format": {"type": "json_object"}},
    "queueing": {
        "prompt": "a", "priority": "high", "tenant": "team@example", "model": "org/model:tag", "deadline": 2e9,
        "ttl": 60.5, "delay": 1.25, "timeout": 30.0, "max_attempts": 7,
    },
    "later": {"prompt": "a", "run_at": 2e9, "priority": "low"},
    "idempotent": {"prompt": "a", "idempotency_key": "order-17/ü"},
    "deduplicated": {"prompt": "a", "temperature": 0.0, "dedupe": True},
    "deduplicated chat": {"messages": TURNS, "temperature": 0.0, "dedupe": True, "max_tokens": 5},
    "keyed": {"prompt": "a", "key": "row \"1\" ü", "metadata": {"row": 1, "ü": [None, 1.5, {"a": "b"}]}},
    "told": {
        "prompt": "a", "stream": True, "webhook": "https://example.org/hook?x=1", "metadata": {},
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    },
}  # fmt: skip

# What a worker ends, and what it checkpoints on the way.
RUN: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    "chat": {"messages": TURNS, "max_tokens": 24, "seed": 5, "metadata": {"row": 3}},
    "samples": {"prompt": "The sea", "n": 2, "max_tokens": 12, "seed": 1, "temperature": 0.9},
    "logprobs": {"prompt": "The sea", "max_tokens": 6, "seed": 1, "logprobs": 2, "prompt_logprobs": 1},
    "schema": {
        "messages": TURNS, "max_tokens": 48, "temperature": 0.0, "structured_outputs": {"json": SCHEMA},
        "logprobs": 0,
    },
    "beams": {"prompt": "The sea", "n": 2, "beam_width": 2, "max_tokens": 5},
    "refused": {"prompt": "word " * 9000},
}  # fmt: skip

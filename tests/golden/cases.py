"""The jobs whose bytes are kept: together they set every field that a job's envelope has."""

from __future__ import annotations

import json
from typing import Any

QUEUE = "golden"
KEY = "a key of thirty-two bytes or more"
SIGNED_AT_S = 1_790_000_000.25
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
UNICODE = '“Grüße”, 你好, \U0001f600 and a\ttab \\ " \u2028\x7f'
TURNS = [{"role": "system", "content": "You label texts."}, {"role": "user", "content": UNICODE}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

JOBS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "Once upon a time"},
    "long prompt": {"prompt": "word " * 60},
    "chat": {"messages": TURNS},
    "token ids": {"prompt_token_ids": [0, 7, 399], "max_tokens": 4},
    "sampled": {
        "prompt": UNICODE, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 2**63 - 1,
        "max_tokens": 64, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -1.0,
        "repetition_penalty": 1.1, "stop": ["\n\n", "ende"], "stop_token_ids": [2, 0],
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
        "logit_bias": {5: -100.0, 7: 1.5}, "allowed_token_ids": [5, 6, 7], "bad_words": ["x y"],
        "logprobs": 3, "prompt_logprobs": 2, "truncate_prompt_tokens": 12,
    },
    "samples": {"prompt": "a", "n": 3, "best_of": 5},
    "beams": {"prompt": "a", "n": 2, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"},
    "schema": {"messages": TURNS, "structured_outputs": {"json": SCHEMA}},
    "schema as text": {"prompt": "a", "structured_outputs": {"json": json.dumps(SCHEMA)}},
    "labels": {
        "prompt": "a", "structured_outputs": {"choice": ["yes", "no", "später"]}, "label_probs": "product",
    },
    "queueing": {
        "prompt": "a", "priority": "high", "tenant": "team@example", "model": "org/model:tag", "deadline": 2e9,
        "ttl": 60.5, "delay": 1.25, "timeout": 30.0, "max_attempts": 7, "keep_input": True,
    },
    "later": {"prompt": "a", "run_at": 2e9, "priority": "low", "revision": "v2", "adapter": "red"},
    "idempotent": {"prompt": "a", "idempotency_key": "order-17/ü"},
    "deduplicated": {"messages": TURNS, "temperature": 0.0, "dedupe": True, "max_tokens": 5},
    "reported": {
        "prompt": "a", "key": 'row "1" ü', "metadata": {"ü": [None, 1.5, {"a": "b"}]}, "stream": True,
        "webhook": "https://example.org/hook?x=1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    },
    "tools": {
        "messages": [
            *TURNS,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
            {"role": "tool", "content": "y", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": "required", "parallel_tool_calls": False, "chat_template_kwargs": {"a": 1},
        "reasoning_effort": "low", "separate_reasoning": True, "thinking_token_budget": 9,
    },
    "dependent": {
        "prompt": "<{a.text}>", "after": {"a": "0123"}, "when": {"a": {"label": ["x"], "prob_at_least": 0.5}},
        "on_parent_failure": "run",
    },
    "score": {"task": "score", "prompt": "a", "continuations": ["b", "c"]},
    "embed": {
        "task": "embed", "inputs": ["a", "b"], "dimensions": 64, "prompt_name": "query",
        "rows_dtype": "float16", "truncate": True,
    },
    "rerank": {"task": "rerank", "prompt": "a", "documents": ["b"]},
}  # fmt: skip

# What a worker ends, and what it checkpoints on the way.
RUN: dict[str, dict[str, Any]] = {
    "samples": {
        "prompt": "The sea", "n": 2, "max_tokens": 12, "seed": 1, "temperature": 0.9, "logprobs": 1,
        "prompt_logprobs": 1, "metadata": {"row": 3},
    },
    "refused": {"prompt": "word " * 9000},
}  # fmt: skip

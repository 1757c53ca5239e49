"""Log-probabilities of a long output need little memory, and reading accepts additions of later versions."""

from __future__ import annotations

import json
import pickle
import tracemalloc

from pagemill.producer.wire.schema.outputs import Output, PositionLogprobs, TokenLogprob

POSITIONS, TOP = 1000, 5


def document(**more: int) -> bytes:
    token = {"token_id": 7, "logprob": -1.25, "text": "ab"} | more
    position = {"chosen": token, "top": [token] * TOP} | more
    return json.dumps({"index": 0, "logprobs": [position] * POSITIONS}).encode()


def test_a_token_takes_few_bytes() -> None:
    raw = document()
    Output.model_validate_json(raw)
    tracemalloc.start()
    try:
        output = Output.model_validate_json(raw)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert output.logprobs is not None
    assert size / (POSITIONS * (1 + TOP)) < 250  # 200, and 550 as models


def test_fields_of_later_releases_are_ignored() -> None:
    output = Output.model_validate_json(document(later=1))
    assert output.logprobs == Output.model_validate_json(document()).logprobs
    assert output.model_dump(mode="json")["logprobs"] == json.loads(document())["logprobs"]


def test_a_position_is_a_value() -> None:
    token = TokenLogprob(token_id=1, logprob=None)
    position = PositionLogprobs(chosen=token, top=(token,))
    assert pickle.loads(pickle.dumps(position)) == position
    assert hash(position) == hash(PositionLogprobs(chosen=token, top=(token,)))

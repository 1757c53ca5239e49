"""Which results count as equal, and the guarantees of fingerprints about them."""

from __future__ import annotations

import base64
import struct
from dataclasses import replace
from typing import Any

import pytest

from pagemill import Job, Output, Result
from pagemill.producer.client.replay.comparison import Comparison, Difference, compare
from pagemill.producer.client.replay.verification import Verification, has_plain_order, judge, promised
from pagemill.producer.wire.schema.outputs import PositionLogprobs, Rows, TokenLogprob


def result(*token_ids: int, **fields: Any) -> Result:
    kept = {name: fields.pop(name) for name in ("fingerprint", "tier", "rows", "labels") if name in fields}
    output = Output(**{"index": 0, "token_ids": token_ids, "finish_reason": "stop", **fields})
    return Result(
        **{"id": "a", "outputs": (output,), "model": "m", "fingerprint": "f", "tier": "token", **kept}
    )


def logprobs(*values: float, top: tuple[int, ...] = ()) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(
            chosen=TokenLogprob(token_id=at, logprob=value),
            top=tuple(TokenLogprob(token_id=token, logprob=-1.0) for token in top),
        )
        for at, value in enumerate(values)
    )


def rows(*numbers: list[float], dtype: Any = "float32") -> Rows:
    letter = "f" if dtype == "float32" else "e"
    raw = b"".join(struct.pack(f"<{len(row)}{letter}", *row) for row in numbers)
    return Rows(dtype=dtype, shape=(len(numbers), len(numbers[0])), data=base64.b64encode(raw).decode())


def test_equal_tokens_and_numbers_are_bitwise() -> None:
    one = result(0, 1, logprobs=logprobs(-0.5, -1.5))
    assert compare(one, one) == Comparison(
        exactness="bitwise", compared=("tokens", "text", "logprobs"), max_logprob_difference=0.0
    )


def test_the_sign_of_a_zero_is_a_bit() -> None:
    found = compare(result(0, logprobs=logprobs(0.0)), result(0, logprobs=logprobs(-0.0)))
    assert (found.exactness, found.max_logprob_difference) == ("token", 0.0)


def test_alternatives_in_another_order_are_other_numbers() -> None:
    one, other = (result(0, logprobs=logprobs(-1.0, top=top)) for top in ((5, 6), (6, 5)))
    found = compare(one, other)
    assert found.difference == Difference(what="logprob", position=0, stored=5, replayed=6)
    assert found.exactness == "token"


def test_numbers_after_other_tokens_are_not_compared() -> None:
    one = result(0, 1, logprobs=logprobs(-1.0, -2.0))
    other = Result.model_validate(one.model_dump())
    changed = other.outputs[0].logprobs or ()
    moved = replace(changed[1], chosen=TokenLogprob(token_id=9, logprob=-9.0))
    output = other.outputs[0].model_copy(update={"token_ids": (0, 9), "logprobs": (changed[0], moved)})
    found = compare(one, other.model_copy(update={"outputs": (output,)}))
    assert (found.exactness, found.max_logprob_difference) == ("neither", 0.0)
    assert found.difference == Difference(
        what="token", position=1, stored=1, replayed=9, stored_logprob=-2.0, replayed_logprob=-9.0
    )


@pytest.mark.parametrize(
    ("fields", "what", "position"),
    [
        ({"text": "ab"}, "text", 1),
        ({"finish_reason": "length"}, "finish_reason", None),
        ({"reasoning": "r"}, "reasoning", 0),
        ({"label": "x"}, "label", None),
        (
            {"tool_calls": ({"id": "call_1", "function": {"name": "f", "arguments": "{}"}},)},
            "tool_calls",
            None,
        ),
    ],
)
def test_what_is_read_off_the_tokens_must_be_equal(
    fields: dict[str, Any], what: str, position: int | None
) -> None:
    found = compare(result(1, **{"text": "a", **fields}), result(1, text="a"))
    assert found.difference is not None
    assert (found.exactness, found.difference.what, found.difference.position) == ("neither", what, position)


def test_the_ids_of_calls_are_each_job_s_own() -> None:
    calls = [
        ({"id": f"call_{name}", "function": {"name": "f", "arguments": "{}"}},) for name in ("one", "other")
    ]
    assert compare(*(result(1, tool_calls=call) for call in calls)).exactness == "bitwise"


@pytest.mark.parametrize(
    ("other", "exactness"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], "bitwise"),
        ([[1.0, 2.0], [3.0, 4.0001]], "close"),
        ([[1.0, 2.0], [3.3, 4.4]], "neither"),  # the same direction, a different length
        ([[1.0, 2.0], [4.0, 3.0]], "neither"),
        ([[1.0, 2.0]], "neither"),
    ],
)
def test_rows_are_compared_by_bits_then_by_cosine_and_length(
    other: list[list[float]], exactness: str
) -> None:
    found = compare(result(rows=rows([1.0, 2.0], [3.0, 4.0])), result(rows=rows(*other)))
    assert found.exactness == exactness
    if exactness == "close":
        assert found.difference is not None
        assert (found.difference.output, found.difference.position) == (1, 1)
        assert found.min_cosine is not None
        assert 0.9999 < found.min_cosine < 1.0


def test_a_lone_score_is_no_direction() -> None:
    assert compare(result(rows=rows([0.9])), result(rows=rows([0.1]))).exactness == "neither"
    assert compare(result(rows=rows([0.0])), result(rows=rows([0.1]))).exactness == "neither"


@pytest.mark.parametrize(
    ("prints", "tiers", "promise"),
    [
        (("f", "f"), ("bitwise", "bitwise"), "bitwise"),
        (("f@abc", "f"), ("bitwise", "token"), "token"),
        (("f@abc", "f@def"), ("bitwise", "bitwise"), "nothing"),
        (("f", "g"), ("bitwise", "bitwise"), "nothing"),
        (("f", "f"), ("token", "continues"), "nothing"),
        (("f", "f"), ("bitwise", "of the future"), "nothing"),
    ],
)
def test_the_weaker_of_two_tiers_is_promised_where_fingerprints_agree(
    prints: tuple[str, str], tiers: tuple[str, str], promise: str
) -> None:
    one, other = (result(1, fingerprint=f, tier=t) for f, t in zip(prints, tiers, strict=True))
    assert promised(one, other) == promise


def apart(gap: float | None) -> Comparison:
    difference = Difference(what="token", position=0, stored=1, replayed=2, gap=gap)
    return Comparison(exactness="neither", compared=("tokens",), difference=difference)


@pytest.mark.parametrize(
    ("gap", "fields", "honoured"),
    [
        (0.0004, {"temperature": 0.0}, True),
        (0.002, {"temperature": 0.0}, False),
        (None, {"temperature": 0.0}, None),
        (0.0004, {}, None),
        (0.0004, {"temperature": 0.0, "presence_penalty": 1.0}, None),
        (0.0004, {"temperature": 0.0, "presence_penalty": 0.0, "logprobs": 2}, True),
    ],
)
def test_the_tier_token_allows_a_near_tie(
    gap: float | None, fields: dict[str, Any], honoured: bool | None
) -> None:
    job = Job.parse({"prompt": "x", "model": "m", **fields})
    assert judge(job, result(1), result(2), apart(gap))[:2] == ("token", honoured)
    assert has_plain_order(job) is (honoured is not None or gap is None)


def test_no_tie_excuses_the_tier_bitwise() -> None:
    job = Job.parse({"prompt": "x", "model": "m", "temperature": 0.0})
    stored, replayed = result(1, tier="bitwise"), result(2, tier="bitwise")
    assert judge(job, stored, replayed, apart(0.0))[:2] == ("bitwise", False)
    only_numbers = Comparison(exactness="token", compared=("tokens",))
    assert judge(job, stored, replayed, only_numbers)[:2] == ("bitwise", False)
    assert judge(job, result(1), result(1), only_numbers)[:2] == ("token", True)


@pytest.mark.parametrize(
    ("fields", "is_reproduced"),
    [
        ({"exactness": "neither", "promise": "token", "honoured": True}, True),
        ({"exactness": "token", "promise": "bitwise", "honoured": False}, False),
        ({"exactness": "token"}, True),
        ({"exactness": "close"}, True),
        ({"exactness": "neither"}, False),
        ({}, False),
    ],
)
def test_a_job_is_reproduced_if_its_promise_holds_or_its_tokens_do(
    fields: dict[str, Any], is_reproduced: bool
) -> None:
    assert Verification(id="a", **fields).is_reproduced is is_reproduced

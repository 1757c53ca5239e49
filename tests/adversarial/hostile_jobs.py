"""Hostile jobs by kind: each ends with a typed error or a correct result, and no other job is affected."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pagemill.producer.wire.schema.outputs import Result

MOST = 2**31 - 1
AMBIGUOUS = "start: s\ns: s s | /[a-z ]/"
Check = Callable[[Result], bool]


@dataclass(frozen=True)
class HostileJob:
    """Fields of an envelope, or bytes instead of it; and the check of its result."""

    fields: dict[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    header: dict[str, Any] = field(default_factory=dict)
    is_signed: bool = True
    is_right: Check | None = None
    """The check of a result; None: any result is accepted."""


def job(is_right: Check | None = None, **fields: Any) -> HostileJob:
    return HostileJob({"prompt": "x", "max_tokens": 8} | fields, is_right=is_right)


def shaped(**shape: Any) -> dict[str, Any]:
    return {"structured_outputs": shape}


def long_outputs() -> Iterator[HostileJob]:
    for n in (1, 128):
        yield job(max_tokens=MOST, ignore_eos=True, n=n)
        yield job(max_tokens=MOST, min_tokens=MOST, n=n)
    yield HostileJob({"prompt": "x", "max_tokens": MOST}, header={"cost": 10**15, "n": 128})


def choices() -> Iterator[HostileJob]:
    rng = random.Random(7)
    for _ in range(3):
        labels = ["".join(rng.choices(string.ascii_letters + string.digits, k=1000)) for _ in range(1000)]
        yield job(
            lambda result, labels=labels: result.text in labels, max_tokens=1500, **shaped(choice=labels)
        )
    nested = ["a" * k for k in range(1, 1025)]
    yield job(lambda result: result.text in nested, max_tokens=1500, **shaped(choice=nested))


def ambiguous_grammars() -> Iterator[HostileJob]:
    for n in (1, 64):
        yield job(n=n, max_tokens=120, seed=n, **shaped(grammar=AMBIGUOUS))
    yield job(n=8, max_tokens=60, seed=1, **shaped(grammar="start: s\ns: s s s | s s | /[a-z ]/ | "))
    yield job(n=64, max_tokens=60, seed=1, **shaped(grammar="start: s\ns: s s | W\nW: /[a-zA-Z ]+/"))


def schema_bombs() -> Iterator[HostileJob]:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = (
            {"anyOf": [deep, {"type": "array", "items": deep}]}
            if len(str(deep)) < 20_000
            else {"items": deep}
        )
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
                                           "b": {"$ref": "#/$defs/a"}}}  # fmt: skip
    bombs: list[Any] = [
        deep, loop, {"enum": [f"{i:06d}" for i in range(7000)]}, {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**9, "maxLength": 10**10}, {"type": "string", "pattern": "(a*)*(b+)+c{9999}"},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
        {"type": "object", "patternProperties": {"^.*(.*)*$": {"$ref": "#"}}}, {"type": "number", "multipleOf": 1e-300},
        {"type": "array", "items": {"type": "string", "format": "email"}}, {"allOf": [{"$ref": "#"}]},
    ]  # fmt: skip
    for bomb in bombs:
        yield job(max_tokens=40, **shaped(json=json.dumps(bomb)))
    for regex in (
        "((a{1000}){1000}){1000}",
        "(x+x+)+y",
        "(" * 5000,
        "[^\\x00-\\U0010ffff]",
        "(?:a?){500}a{500}",
    ):
        yield job(max_tokens=40, **shaped(regex=regex))
    rules = "start: " + " | ".join(f"r{i}" for i in range(900)) + "\n"
    rules += "\n".join(f"r{i}: r{(i * 7) % 900} r{(i * 11) % 900} | /[a-z]{{1,{i + 1}}}/" for i in range(900))
    for grammar in (rules, "start: start", "start: a\na: b\nb: a", "start: /(/", "start: \n" * 3000):
        yield job(max_tokens=40, **shaped(grammar=grammar))


def many_logprobs() -> Iterator[HostileJob]:
    yield job(n=128, logprobs=20, max_tokens=4000, ignore_eos=True)
    yield job(n=1, logprobs=20, max_tokens=MOST, ignore_eos=True)
    yield job(prompt="y" * 3500, prompt_logprobs=20, logprobs=20, n=128, max_tokens=100)
    yield job(best_of=128, n=1, logprobs=20, max_tokens=2000, ignore_eos=True)
    yield job(beam_width=128, n=128, logprobs=20, max_tokens=300, ignore_eos=True)


EXTREMES: tuple[dict[str, Any], ...] = (
    {"temperature": 5e-324},
    {"temperature": 1e308},
    {"temperature": 1e-45, "top_p": 5e-324},
    {"top_p": 5e-324},
    {"top_p": 1 - 2**-53, "top_k": MOST},
    {"min_p": 1.0, "top_p": 5e-324, "top_k": 1},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e308},
    {"repetition_penalty": 1e-300, "temperature": 1e300},
    {"logit_bias": {"65": 3.5e38}},
    {"logit_bias": {"65": -3.5e38, "66": 3.5e38}},
    {"logit_bias": {"65": 1e308}},
    {"logit_bias": {str(i): -1e308 for i in range(1024)}},
    {"logit_bias": {"0": 3.4028234e38}, "temperature": 5e-324},
    {"logit_bias": {"65": 1e308, "66": -1e308}, "temperature": 1e308, "repetition_penalty": 1e308},
    {"logit_bias": {str(MOST): 1.0}},
    {"stop_token_ids": [MOST]},
    {"seed": 2**63 - 1, "n": 128},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 2000, "ignore_eos": True},
    {"beam_width": 128, "length_penalty": 10.0},
    {"beam_width": 2, "length_penalty": -10.0, "early_stopping": "never"},
    {"truncate_prompt_tokens": 1},
    {"truncate_prompt_tokens": MOST},
    {"prompt_token_ids": [MOST], "prompt": None},
)


def extreme_sampling() -> Iterator[HostileJob]:
    for values in EXTREMES:
        yield job(**{"seed": 3, "logprobs": 5} | values)
        yield job(**{"temperature": 0.0} | values)


def banned_tokens() -> Iterator[HostileJob]:
    """No token is left to choose from; or one token with the lowest possible bias."""
    only = {"allowed_token_ids": [65]}
    for more in (
        {},
        {"logit_bias": {"65": -1e308}},
        {"logit_bias": {"65": -3.5e38}},
        {"bad_words": ["A"]},
        {"min_tokens": 8},
        {"stop_token_ids": [65], "min_tokens": 8},
        {"logprobs": 20, "n": 8},
    ):
        # The echo model repeats its prompt, regardless of the allowed tokens.
        yield job(
            lambda result: result.model == "echo" or set(result.token_ids) <= {65}, seed=1, **only | more
        )
    yield job(allowed_token_ids=[MOST])
    yield job(allowed_token_ids=[MOST, 65], max_tokens=4)
    yield job(allowed_token_ids=list(range(65_536)), max_tokens=4)
    yield job(bad_words=[chr(i) for i in range(32, 127)] * 2, seed=1)
    for more in (
        {"bad_words": ["b"]},
        only,
        {"logit_bias": {"66": -1e308}},
        {"stop": ["b"]},
        {"min_tokens": 8},
    ):
        yield job(seed=1, **shaped(choice=["b"]), **more)


def large_inputs() -> Iterator[HostileJob]:
    yield job(prompt="z" * 1_040_000)
    yield job(prompt="z" * 1_040_000, truncate_prompt_tokens=8)
    yield job(prompt=None, prompt_token_ids=[65] * 260_000)
    yield job(prompt=None, messages=[{"role": "user", "content": "y"}] * 1024)
    yield job(prompt=None, messages=[{"role": "user", "content": "y" * 1000}] * 1024)
    yield job(stop=[f"{i:04d}" + "s" * 4092 for i in range(64)], max_tokens=200, ignore_eos=True)
    yield job(stop=["x" * k for k in range(4033, 4097)], max_tokens=3000, ignore_eos=True, n=16)
    yield job(bad_words=[f"{i:03d}" + "w" * 4000 for i in range(256)])
    yield job(metadata={"m": "v" * 16_300})
    yield HostileJob({"prompt": "x", "max_tokens": 4}, header={"metadata": json.dumps({"m": "v" * 16_000})})
    yield HostileJob({"prompt": "x", "metadata": {str(i): {"a": [1] * 9} for i in range(20_000)}})


def broken_payloads() -> Iterator[HostileJob]:
    rng = random.Random(11)
    good = json.dumps({"v": 1, "prompt": "x", "model": "MODEL"}).encode()
    for raw in (
        b"",
        b"\x00",
        b"\xff" * 1000,
        b"[" * 500_000,
        b'{"a":' * 200_000,
        b'{"v":1,"prompt":"\\ud800","model":"MODEL"}',
        b'{"v":1,"prompt":"\xed\xa0\x80","model":"MODEL"}',
        b'{"v":1,"prompt":"x","model":"MODEL","stop":["\\udfff"]}',
        b'{"v":' + b"9" * 100_000 + b"}",
        b'{"v":1,"v":1}',
        good + good,
        good[:-1],
        b"\xef\xbb\xbf" + good,
        b'{"v":1,"prompt":"x","model":"MODEL","metadata":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"v":1,"prompt":"x","model":"MODEL","temperature":1e999}',
        b'{"v":1,"prompt":"x","model":"MODEL","seed":NaN}',
        b'{"mac":"' + b"0" * 64 + b'","signed_at":1,"v":1}',
        b'{"mac":"',
        b'{"mac":"' + b"0" * 64 + b'","signed_at":' + b"9" * 5000,
        *(bytes(rng.choice(good) if rng.random() < 0.1 else byte for byte in good) for _ in range(60)),
        *(rng.randbytes(rng.randint(1, 2000)) for _ in range(20)),
    ):
        yield HostileJob(raw=raw, is_signed=False)
        yield HostileJob(raw=raw)


def wrong_signatures() -> Iterator[HostileJob]:
    for _ in range(20):
        yield HostileJob({"prompt": "x", "max_tokens": 8}, is_signed=False, is_right=lambda result: False)
    mac = b'{"mac":"%064d","signed_at":1790000000000,"v":1,"prompt":"x","model":"MODEL"}' % 0
    yield HostileJob(raw=mac, is_signed=False, is_right=lambda result: False)


def equal_jobs() -> Iterator[HostileJob]:
    """More than may follow one, each with the maximum output of a job."""
    for _ in range(257):
        fields = {"prompt": "equal", "n": 64, "logprobs": 20, "seed": 1, "max_tokens": 60, "ignore_eos": True}
        yield HostileJob(fields, header={"twin": "evil:equal", "cost": 1, "n": 64})


KINDS: dict[str, Callable[[], Iterator[HostileJob]]] = {
    "long outputs": long_outputs, "choices": choices, "ambiguous grammars": ambiguous_grammars,
    "schema bombs": schema_bombs, "many logprobs": many_logprobs, "extreme sampling": extreme_sampling,
    "banned tokens": banned_tokens, "large inputs": large_inputs, "broken payloads": broken_payloads,
    "wrong signatures": wrong_signatures, "equal jobs": equal_jobs,
}  # fmt: skip

"""Time per token mask and per compiled schema, compared with llguidance alone on the same tokens.

`python -m benchmarks.structured_output`. The schemas vary like those of JSON Schema's test suite; the
tokenizer is SmolLM2's. llguidance in this process and a schema's process follow each schema along the same
random tokens, alternately: one output, 16 outputs of a schema, and 16 outputs of 16 schemas. The time per
mask is the time of a step, from the sampled tokens to all their masks, divided by its outputs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.outputs import Histogram
from pagemill.engine.structured_output.compiler import SchemaCompiler
from pagemill.engine.structured_output.fork_server import ForkServer
from pagemill.engine.structured_output.matcher import MatcherGrammar, compile_schema
from pagemill.engine.structured_output.served_grammar import MaskBudget, ServedGrammar
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary
from pagemill.engine.text.tokenizer import generation_eos_token_ids, load_tokenizer

STEPS = 60


def _object(required: Iterable[str] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def schemas(seed: int) -> list[tuple[str, str]]:
    """Return (kind, text) of 24 schemas; every seed returns others."""
    name, text, number = f"field{seed}", {"type": "string"}, {"type": "number"}
    found: list[Any] = [
        _object([name], **{name: text}),
        _object([name, "b"], **{name: text, "b": {"type": "integer"}}) | {"additionalProperties": False},
        _object(**{name: text, "b": number, "c": {"type": "boolean"}, "d": {"type": "null"}}),
        _object([name], **{name: {"type": "array", "items": number, "minItems": 2, "maxItems": 9}}),
        _object([name], **{name: {"enum": ["one", 2, None, True, {"three": [3]}]}}),
        _object([name], **{name: {"type": "string", "minLength": 3, "maxLength": 40}}),
        _object([name], **{name: {"type": "string", "pattern": "^[A-Z]{2,5}-[0-9]{3,8}$"}}),
        _object([name], **{name: {"type": "string", "format": "date-time"}, "mail": {"format": "email"}}),
        _object([name], **{name: {"type": "integer", "minimum": -17, "exclusiveMaximum": 40_000}}),
        _object([name], **{name: {"anyOf": [text, number, {"type": "array", "items": text}]}}),
        _object([name], **{name: {"oneOf": [{"const": f"c{i}"} for i in range(40)]}, "rest": text}),
        _object([name], **{name: {"allOf": [_object(["x"], x=text), _object(["y"], y=number)]}}),
        _object(**{f"{name}_{i}": text for i in range(30)}),
        _object([f"{name}_{i}" for i in range(30)], **{f"{name}_{i}": number for i in range(30)}),
        _object([name], **{name: _object(["deep"], deep=_object(["er"], er=_object(["est"], est=text)))}),
        {"type": "array", "prefixItems": [text, number, {"const": name}], "items": {"type": "boolean"}},
        {"type": "array", "items": _object([name, "n"], **{name: text, "n": {"type": "integer"}})},
        {"type": "object", "patternProperties": {f"^{name}[a-z]+$": number}, "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "array", "items": text}, "title": name},
        {"$defs": {"node": _object(["v"], v=text, next={"$ref": "#/$defs/node"})}, "$ref": "#/$defs/node",
         "title": name},
        {"title": name},
    ]  # fmt: skip
    return [("json", json.dumps(schema)) for schema in found] + [
        ("regex", rf"({name}|\d+)( [a-z]{{1,12}}){{3,40}}"),
        ("regex", rf"[A-Z][a-z]+, (yes|no|maybe) {name}( \w+)*"),
        ("grammar", f'start: e\ne: t (("+"|"-") t)*\nt: "(" e ")" | NUM | "{name}"\nNUM: /[0-9]+/'),
    ]


class Comparison:
    """The seconds of llguidance alone and of the processes, by measurement."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocab_size = vocabulary.vocab_size
        self._tokenizer = vocabulary.build()
        self._compiler = SchemaCompiler(ForkServer(vocabulary), Histogram((1.0,)))
        self.times: dict[str, tuple[list[float], list[float]]] = {}

    def compile(self, kind: str, text: str) -> None:
        started = time.perf_counter()
        compile_schema(self._tokenizer, kind, text)
        alone = time.perf_counter() - started
        schema = self._compiler.compile(kind, text)
        user = schema.grammar(MaskBudget())
        started = time.perf_counter()
        self._pump(lambda: schema.is_done)
        self._record("compile", alone, time.perf_counter() - started)
        schema.check()
        del user

    def follow(self, name: str, texts: list[tuple[str, str]], outputs: int, rng: random.Random) -> None:
        """Generate outputs of these schemas, which are compiled."""
        own = {text: compile_schema(self._tokenizer, *text) for text in texts}
        pairs = [
            (own[text].start(), self._compiler.compile(*text).grammar(MaskBudget()))
            for text in (texts * outputs)[:outputs]
        ]
        for _ in range(STEPS):
            pairs = [pair for pair in pairs if not pair[0].is_complete]
            if not pairs:
                return
            self._step(name, pairs, [self._draw(alone.token_mask(), rng) for alone, _ in pairs])

    def _step(self, name: str, pairs: list[tuple[MatcherGrammar, ServedGrammar]], tokens: list[int]) -> None:
        started = time.perf_counter()
        forced = [alone.advance(token) for (alone, _), token in zip(pairs, tokens, strict=True)]
        alone_s = time.perf_counter() - started
        started = time.perf_counter()
        for (_, served), token in zip(pairs, tokens, strict=True):
            served.prepare(token)
        self._pump(lambda: all(served.is_ready for _, served in pairs))
        answers = [served.advance(token) for (_, served), token in zip(pairs, tokens, strict=True)]
        self._record(name, alone_s / len(pairs), (time.perf_counter() - started) / len(pairs))
        assert answers == forced
        assert all(alone.is_complete or alone.token_mask() == one.token_mask() for alone, one in pairs)

    def _pump(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._compiler.pump(1.0)

    def _draw(self, mask: bytes, rng: random.Random) -> int:
        allowed, start = int.from_bytes(mask, "little"), rng.randrange(self._vocab_size)
        start = start if allowed >> start else 0
        rest = allowed >> start
        return start + (rest & -rest).bit_length() - 1

    def _record(self, name: str, alone: float, served: float) -> None:
        for times, seconds in zip(self.times.setdefault(name, ([], [])), (alone, served), strict=True):
            times.append(seconds)


def load() -> GrammarVocabulary:
    directory: Path = packaged_model_directory()
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    vocabulary = GrammarVocabulary.from_tokenizer(tokenizer, size, tuple(generation_eos_token_ids(directory)))
    assert vocabulary is not None
    return vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    comparison, rng = Comparison(load()), random.Random(0)
    comparison.compile("regex", "a+")  # starts the first process
    comparison.times.clear()
    for number in range(rounds):
        texts = schemas(number)
        for text in texts:
            comparison.compile(*text)
        for text in texts:
            comparison.follow("mask, 1 output", [text], 1, rng)
            comparison.follow("mask, 16 outputs of a schema", [text], 16, rng)
        comparison.follow("mask, 16 outputs of 16 schemas", rng.sample(texts, 16), 16, rng)
    for name, (alone, served) in comparison.times.items():
        ratio = statistics.median(b / a for a, b in zip(alone, served, strict=True))
        print(f"{name:32} alone {_figures(alone)}; served {_figures(served)}; ratio {ratio:.2f}")


def _figures(times: list[float]) -> str:
    p99 = sorted(times)[len(times) * 99 // 100]
    return f"{statistics.median(times) * 1e6:6.0f} us, p99 {p99 * 1e6:6.0f} us"


if __name__ == "__main__":
    main()

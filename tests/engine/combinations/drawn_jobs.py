"""Random combinations of job fields, drawn from a seed, and the engine that runs the jobs until all have finished."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.common.sampling_fields import SAMPLING_FIELDS
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
SHARED = "The quick brown fox jumps over the lazy dog. "
LABELS = ("yes", "no", "yes!", "n", "late")
OBJECT = (
    '{"type":"object","properties":{"a":{"type":"integer","minimum":0,"maximum":99},"b":{"enum":["x","y"]}},'
    '"required":["a","b"],"additionalProperties":false}'
)
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"choice": ("yes", "no", "yes!", "maybe not")}, {"choice": ("a",)}, {"regex": "[ab]{1,5}c?"},
    {"regex": "(foo|bar)+"}, {"json": OBJECT},
)  # fmt: skip
NOT_DRAWN = {"thinking_token_budget"}
"""It needs a model that writes reasoning tags."""
MAX_STEPS = 20_000


@dataclass(frozen=True)
class Drawn:
    """A job: its prompt for generation, or its texts for scoring."""

    prompt: str
    fields: dict[str, Any]
    continuations: tuple[list[int], ...] | None = None
    """Token ids to score; () for the prompt's own; None: it generates."""
    priority: int = 0


@dataclass
class Sample:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    cumulative: float | None = None
    label_probs: tuple[float, ...] | None = None


@dataclass
class Ended:
    """The outcome of a job: its samples, or its error."""

    samples: dict[int, Sample] = field(default_factory=dict)
    error: tuple[str | None, str] | None = None


def draw(seed: int, number: int) -> list[Drawn]:
    rng = random.Random(seed)
    return [_scoring(rng) if rng.random() < 0.12 else _generating(rng) for _ in range(number)]


def _prompt(rng: random.Random) -> str:
    text = (SHARED * 3)[: rng.choice([1, 2, 7, 20, 45, 90])]
    if rng.random() < 0.2:
        text = ("ab cd " * 20)[: len(text) + 10]  # for drafts
    if rng.random() < 0.4:
        text += "".join(rng.choices("abcdef ", k=rng.choice([1, 5, 30])))
    return text


def _scoring(rng: random.Random) -> Drawn:
    chosen = rng.sample(LABELS, rng.choice([1, 2, 4])) if rng.random() < 0.7 else []
    continuations = tuple(TOKENIZER.encode(label) for label in chosen)
    fields = {"logprobs": rng.choice([0, 0, 3])}
    return Drawn(_prompt(rng) + " xy", fields, continuations, rng.choice([0, 0, 1, -1]))


def _generating(rng: random.Random) -> Drawn:
    vocabulary = range(TOKENIZER.vocab_size)

    def some(share: float, *values: Any) -> Any:
        return rng.choice(values) if rng.random() < share else None

    structure = some(0.3, *STRUCTURES)
    drawn = {
        "temperature": some(0.6, 0.0, 0.0, 0.7, 1.5), "n": some(0.25, 1, 2, 3), "best_of": some(0.1, 1, 2, 4),
        "beam_width": some(0.12, 1, 2, 4), "length_penalty": some(0.1, 0.0, -1.0, 2.0),
        "early_stopping": some(0.1, True, False, "never"), "min_tokens": some(0.1, 1, 3, 10),
        "top_k": some(0.2, -1, 1, 5, 1000), "top_p": some(0.2, 0.1, 0.9), "min_p": some(0.1, 0.05),
        "stop": some(0.15, ("a",), ("e", "\n"), ("xy",)),
        "stop_token_ids": some(0.1, tuple(rng.sample(vocabulary, 3))),
        "include_stop_str_in_output": some(0.1, True), "ignore_eos": some(0.3, True),
        "presence_penalty": some(0.1, -2.0, 1.0), "frequency_penalty": some(0.1, -1.0, 1.0),
        "repetition_penalty": some(0.1, 0.5, 1.3),
        "logit_bias": some(0.1, {token: rng.choice([-100.0, 5.0, 100.0]) for token in rng.sample(vocabulary, 3)}),
        "allowed_token_ids": some(0.1, *(tuple(rng.sample(vocabulary, size)) for size in (1, 5, 40))),
        "bad_words": some(0.1, ("ab",), ("e",)), "logprobs": some(0.25, 0, 1, 5), "prompt_logprobs": some(0.15, 0, 2),
        "truncate_prompt_tokens": some(0.1, 1, 5, 100), "skip_special_tokens": some(0.1, False),
        "structured_outputs": None if structure is None else StructuredOutputs(**structure),
        "label_probs": some(0.4 if structure else 0.03, "product", "mean", "constrained"),
    }  # fmt: skip
    drawn |= {"max_tokens": rng.choice([1, 1, 2, 5, 12, 40]), "seed": rng.randrange(1000)}
    assert drawn.keys() | NOT_DRAWN == set(SAMPLING_FIELDS), "draw the new sampling field too"
    fields = {name: value for name, value in drawn.items() if value is not None}
    return Drawn(_prompt(rng), fields, priority=rng.choice([0, 0, 1, -1]))


def run(engine: Engine, jobs: Sequence[Drawn], at_once: int) -> list[Ended]:
    """Run jobs, a few together; the engine's own accounts must be right after every step."""
    ended = [Ended() for _ in jobs]
    pending, live = list(range(len(jobs)))[::-1], 0
    for _ in range(MAX_STEPS):
        while pending and live < at_once:
            number = pending.pop()
            try:
                _add(engine, str(number), jobs[number])
                live += 1
            except InvalidRequest as error:
                ended[number].error = (error.code, str(error))
        if not live and not pending:
            return ended
        for output in engine.step():
            job = ended[int(output.request_id)]
            for delta in output.deltas:
                sample = job.samples.setdefault(delta.index, Sample())
                sample.token_ids += delta.token_ids
                sample.text += delta.text
                sample.finish_reason = delta.finish_reason or sample.finish_reason
                sample.logprobs += [entry.logprob for entry in delta.logprobs or ()]
                sample.cumulative, sample.label_probs = delta.cumulative_logprob, delta.label_probs
            if output.finished:
                live -= 1
                job.error = None if output.error is None else (output.error_code, output.error)
        engine.check_integrity()
    raise AssertionError("the engine gets nowhere")


def _add(engine: Engine, name: str, job: Drawn) -> None:
    params = SamplingParams(**job.fields)
    processor = engine.input_processor
    if job.continuations is None:
        ids, params = processor.process(prompt=job.prompt, params=params)
        engine.add_request(name, ids, params, priority=job.priority)
        return
    ids, params, task = processor.process_score(job.continuations, prompt=job.prompt, params=params)
    engine.add_request(name, ids, params, task=task, priority=job.priority)


def are_close(one: Any, other: Any, tolerance: float) -> bool:
    """Equal, numbers up to a tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(are_close(left, right, tolerance) for left, right in pairs)
    return bool(one == other)


def difference(wanted: Ended, found: Ended) -> str | None:
    """The first difference; None if there is none."""
    if wanted.error != found.error:
        return f"{wanted.error} and {found.error}"
    if wanted.samples.keys() != found.samples.keys():
        return f"samples {wanted.samples.keys()} and {found.samples.keys()}"
    for index, one in wanted.samples.items():
        other = found.samples[index]
        for name in ("token_ids", "text", "finish_reason"):
            if getattr(one, name) != getattr(other, name):
                return f"{name} of {index}: {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in ("logprobs", "cumulative", "label_probs"):
            if not are_close(getattr(one, name), getattr(other, name), 5e-3):
                return f"{name} of {index}: {getattr(one, name)} and {getattr(other, name)}"
    return None

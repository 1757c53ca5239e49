"""Requests and logits at the limits of their number formats, and the permitted results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.execution.sampling.sampler import Sampler
from pagemill.engine.execution.staging import DirectTransfer
from pagemill.engine.plan import NewRow, Sample, StepResult
from pagemill.engine.sampling_params import SamplingParams

VOCAB_SIZE = 24
EOS = (3, 9)
PROMPT = (20, 21)

_FLOATS = [
    0.0, -0.0, 5e-324, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-8, 9.9e-6, 1e-5, 1e-3, 0.5, 1.0, 1.5, 2.0, 1e3, 1e6, 1e30,
    3.4e38, 3.5e38, 1e308, -5e-324, -1.0, -1e6, -3.4e38, -1e308, math.inf, -math.inf, math.nan,
]  # fmt: skip
_NUMBERS = st.sampled_from(_FLOATS) | st.floats()
_TOKENS = st.integers(0, VOCAB_SIZE - 1)
_LOGITS = (
    st.floats(-30, 30, width=32)
    | st.sampled_from([0.0, -math.inf, 3.4028234663852886e38, -3.4028234663852886e38, 1e-45, -1e38])
    | st.sampled_from([math.nan, math.inf])
)

_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.just(0.0) | _NUMBERS,
        "top_p": _NUMBERS,
        "min_p": _NUMBERS,
        "top_k": st.sampled_from([-1, 0, 1, 2, VOCAB_SIZE, 2**31 - 1, 2**31, 2**63]),
        "repetition_penalty": _NUMBERS,
        "presence_penalty": _NUMBERS,
        "frequency_penalty": _NUMBERS,
        "logit_bias": st.dictionaries(_TOKENS, _NUMBERS, max_size=3),
        "allowed_token_ids": st.lists(_TOKENS, min_size=1, max_size=4).map(tuple),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.lists(_TOKENS, max_size=4).map(tuple),
        "logprobs": st.sampled_from([0, 2, 20]),
    },
)


@dataclass(frozen=True)
class Case:
    fields: dict[str, Any]
    output: list[int]
    bad_words: tuple[tuple[int, ...], ...]
    grammar: frozenset[int] | None
    as_mask: bool
    logits: list[float]

    def work(self, row: int) -> SampleWork | None:
        """None: the request is rejected."""
        try:
            params = SamplingParams(max_tokens=16, **self.fields)
        except InvalidRequest:
            return None
        new_row = NewRow(row, "r", 0, list(PROMPT), len(PROMPT), [1], params, 7 + row, self.bad_words)
        sample = Sample(row, row, len(PROMPT) + len(self.output))
        if self.grammar is not None and self.as_mask:
            sample.token_mask = sum(1 << token for token in self.grammar).to_bytes(VOCAB_SIZE // 8, "little")
        elif self.grammar is not None:
            sample.allowed_token_ids = sorted(self.grammar)
        return SampleWork(sample, new_row)

    def allowed(self) -> set[int]:
        """The permitted tokens, by the definitions."""
        grammar = frozenset(range(VOCAB_SIZE)) if self.grammar is None else self.grammar
        allowed = grammar & frozenset(self.fields.get("allowed_token_ids", range(VOCAB_SIZE)))
        if len(self.output) < self.fields.get("min_tokens", 0):
            ends = frozenset((*EOS, *self.fields.get("stop_token_ids", ())))
            if self.grammar is None or not grammar <= ends:
                allowed -= ends
        begun = {
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or tuple(self.output[-(len(word) - 1) :]) == word[:-1]
        }
        return {token for token in allowed - begun if self.logits[token] > -math.inf}


CASES = st.builds(
    Case,
    fields=_FIELDS,
    output=st.lists(_TOKENS, max_size=4),
    bad_words=st.lists(st.lists(_TOKENS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    grammar=st.none() | st.frozensets(_TOKENS, min_size=1, max_size=4),
    as_mask=st.booleans(),
    logits=st.lists(_LOGITS, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
    | st.lists(st.floats(-30, 30, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
)


def check(cases: list[Case], *, draws_on_device: bool = False) -> None:
    """Sample all accepted requests in one step, and check the result of each."""
    accepted = [(case, work) for row, case in enumerate(cases) if (work := case.work(row)) is not None]
    if not accepted:
        return
    table = torch.zeros(len(cases), 32, dtype=torch.int64)
    for case, work in accepted:
        known = [*PROMPT, *case.output]
        table[work.row.row, : len(known)] = torch.tensor(known)
    sampler, transfer = Sampler(EOS, draws_on_device=draws_on_device), DirectTransfer(torch.device("cpu"))
    works = [work for _, work in accepted]
    draws = sampler.stage(works, VOCAB_SIZE, transfer)
    transfer.send()
    result = StepResult(0, [])
    output = sampler.sample(torch.tensor([case.logits for case, _ in accepted]), works, table, draws)
    output.fill(result, iter(output.tensors()))
    for number, (case, work) in enumerate(accepted):
        (token,) = result.token_ids[number]
        assert 0 <= token < VOCAB_SIZE, "the token goes into the next step's embedding, valid or not"
        peak = max(case.logits) if not any(map(math.isnan, case.logits)) else math.nan
        assert (number in result.invalid) == (not math.isfinite(peak))
        if number in result.invalid:
            continue
        allowed = case.allowed()
        if number in result.without_choice:
            # Only sums and products of logits near the limit of fp32 may overflow.
            assert not allowed or max(map(abs, filter(math.isfinite, case.logits))) > 1e30
            continue
        assert token in allowed
        for entry in result.logprobs.get(number, ()):
            assert work.params.logprobs is not None
            values = [entry.logprob, *(value for _, value in entry.top)]
            assert all(value is not None and math.isfinite(value) for value in values)

"""Lists that repeat the sampling fields name every one of them."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.common.bounds import InvalidParameter
from pagemill.common.sampling_fields import SAMPLING_FIELDS, SamplingFields
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.producer.client.replay.verification import KEEPS_ORDER
from tests.conftest import ROOT

CHANGES_ORDER = {
    "best_of", "beam_width", "length_penalty", "early_stopping", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
    "structured_outputs", "thinking_token_budget", "label_probs",
}  # fmt: skip
"""A difference between two greedy replays is not treated as a tie in log-probabilities if one of these is set."""


def test_a_replay_knows_whether_a_field_changes_the_order_of_candidates() -> None:
    assert set(SAMPLING_FIELDS) == KEEPS_ORDER | CHANGES_ORDER
    assert not KEEPS_ORDER & CHANGES_ORDER


def test_the_page_on_sampling_names_every_field() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("sampling.md", "tools.md"))
    assert [name for name in SAMPLING_FIELDS if f"`{name}`" not in page and f"`{name}:" not in page] == []


WITHOUT_BEAMS: dict[str, Any] = {
    "best_of": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "stop": ("x",),
    "structured_outputs": StructuredOutputs(regex="a"), "thinking_token_budget": 3,
}  # fmt: skip
WITH_BEAMS: dict[str, Any] = {
    "n": 2, "length_penalty": 0.5, "early_stopping": True, "max_tokens": 3, "min_tokens": 2, "seed": 1,
    "stop_token_ids": (1,), "include_stop_str_in_output": True, "ignore_eos": True, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {1: 1.0}, "allowed_token_ids": (1,),
    "bad_words": ("x",), "logprobs": 1, "prompt_logprobs": 1, "truncate_prompt_tokens": 3,
    "skip_special_tokens": False,
}  # fmt: skip


def test_a_beam_search_takes_the_fields_that_it_lists() -> None:
    assert set(SAMPLING_FIELDS) == WITHOUT_BEAMS.keys() | WITH_BEAMS.keys() | {"beam_width", "label_probs"}
    for name, value in WITH_BEAMS.items():
        SamplingFields(**{"beam_width": 2, name: value}).check()
    for off in ({"temperature": 0.0}, {"top_k": -1}):
        SamplingFields(beam_width=2, **off).check()
    for name, value in WITHOUT_BEAMS.items():
        with pytest.raises(InvalidParameter, match=f"a beam search cannot be combined with {name}$"):
            SamplingFields(**{"beam_width": 2, name: value}).check()

"""Lists that repeat the sampling fields name every one of them."""

from __future__ import annotations

from pagemill.common.sampling_fields import SAMPLING_FIELDS
from pagemill.producer.client.replay.verification import KEEPS_ORDER
from tests.conftest import ROOT

CHANGES_ORDER = {
    "best_of", "beam_width", "length_penalty", "early_stopping", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
    "structured_outputs", "thinking_token_budget", "label_probs",
}  # fmt: skip
"""A difference between two greedy replays is not compared with a tie in log-probabilities where one of these is set."""


def test_a_replay_knows_whether_a_field_changes_the_order_of_candidates() -> None:
    assert set(SAMPLING_FIELDS) == KEEPS_ORDER | CHANGES_ORDER
    assert not KEEPS_ORDER & CHANGES_ORDER


def test_the_page_on_sampling_names_every_field() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("sampling.md", "tools.md"))
    assert [name for name in SAMPLING_FIELDS if f"`{name}`" not in page and f"`{name}:" not in page] == []

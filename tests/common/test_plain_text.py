"""Untrusted text in lines for users."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill.common.plain_text import escaped, shortened
from pagemill.producer.wire.schema.outputs import MAX_MESSAGE_CHARACTERS, ErrorInfo


@given(st.text())
def test_escaped_text_is_printable_and_loses_nothing(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


def test_visible_text_is_unchanged() -> None:
    text = "Größe 日本語 \U0001f600 \\n"
    assert escaped(text) == text
    assert escaped("a\r\n\tb\x1b[2J\x9b\u2028\u202e\ud800") == r"a\r\n\tb\x1b[2J\x9b\u2028\u202e\ud800"


@given(st.text(max_size=300), st.integers(50, 100))
def test_shortened_text_keeps_both_ends(text: str, limit: int) -> None:
    shown = shortened(text, limit)
    assert len(shown) <= limit
    assert shown == text or (len(text) > limit and shown[:5] == text[:5] and shown[-5:] == text[-5:])
    assert shortened(shown, limit) == shown


def test_an_error_of_a_job_is_one_line_of_bounded_length() -> None:
    error = ErrorInfo(code="adapter_invalid", message=f"field 'x\n\x1b[2J' {'y' * 10**6}")
    assert error.message.isprintable()
    assert len(error.message) <= MAX_MESSAGE_CHARACTERS
    assert ErrorInfo.model_validate_json(error.model_dump_json()) == error

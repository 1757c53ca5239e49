"""Estimates of a text's tokens by its bytes, for the cost of jobs."""

from __future__ import annotations

BYTES_PER_TOKEN = 3
"""A low estimate for text, so that a job's cost is overestimated rather than underestimated."""


def text_tokens(text: bytes) -> int:
    """Estimate the tokens in UTF-8 text."""
    return len(text) // BYTES_PER_TOKEN + 1


def turn_tokens(content: bytes) -> int:
    """Estimate the tokens of a message, including those that the chat template adds."""
    return text_tokens(content) + 4

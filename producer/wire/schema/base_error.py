"""The root of the exceptions, and the one that outputs raise; errors.py has them all."""

from __future__ import annotations


class PagemillError(Exception):
    """The root of the tree."""


class InvalidOutput(PagemillError, ValueError):
    """The output is no JSON of the class that it was to be parsed as, perhaps because it was cut off."""

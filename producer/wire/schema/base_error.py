"""The base of the exceptions, and the one that outputs raise; errors.py has all of them."""

from __future__ import annotations


class PagemillError(Exception):
    """The base of all exceptions of Pagemill."""


class InvalidOutput(PagemillError, ValueError):
    """The output is not JSON of the requested class, possibly because it was cut off."""

"""The exceptions of dataset runs."""

from __future__ import annotations

from pagemill.producer.wire.schema.base_error import PagemillError


class DatasetError(PagemillError):
    """The run cannot start or continue; the message contains a remedy."""


class EmptyFile(DatasetError):
    """The file does not even have a header."""


class DiskError(DatasetError):
    """A write failed in the middle of a run; earlier writes are kept."""


class RunStopped(DatasetError):
    """A run cannot continue after its start; finished work is kept."""

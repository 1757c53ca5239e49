"""The exceptions of dataset runs."""

from __future__ import annotations

from pagemill.producer.wire.schema.base_error import PagemillError


class DatasetError(PagemillError):
    """The run cannot start or continue; the message says what to do."""


class EmptyFile(DatasetError):
    """The file has not even a header."""


class DiskError(DatasetError):
    """A write failed in the middle of a run; earlier writes are kept."""


class RunStopped(DatasetError):
    """A run that has begun cannot continue; what is done is kept."""

"""The settings of a worker with an endpoint, and their checks. Imports no HTTP client."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pagemill.engine.errors import ConfigError

NO_TOKENIZER = "endpoint"
"""Replaces the name of a model's folder if the worker has no tokenizer."""
MAX_URL = 2048
_PRINTED = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The endpoint's address, and the operator's settings for it."""

    url: str
    key: str = field(default="", repr=False)
    revision: str = ""
    """The operator's name for the model's revision."""
    stall_s: float = 60.0
    """Seconds without output after which a request counts as hung."""


def check_engine_url(url: str) -> str:
    """Return an endpoint's address. Raises ValueError, whose message does not contain it."""
    rule = (
        "it should be an http or https URL without a user, a query or a fragment, such as http://host:8000/v1"
    )
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if (
        not is_valid
        or len(url) > MAX_URL
        or not _PRINTED.fullmatch(url)
        or any(mark in url for mark in "@?#")
    ):
        raise ValueError(rule)
    return url


def check_endpoint_options(url: str, options: MutableMapping[str, Any]) -> None:
    """Check the engine's options of a worker with an endpoint, and complete them. Raises `ConfigError`."""
    try:
        check_engine_url(url)
    except ValueError as error:
        raise ConfigError(f"engine_url: {error}", "engine_url") from None
    if not options.get("served_model_name"):
        raise ConfigError(
            "served_model_name: it is missing; jobs select the endpoint by it", "served_model_name"
        )
    model = options.setdefault("model", NO_TOKENIZER) or NO_TOKENIZER
    if model != NO_TOKENIZER and not Path(model).expanduser().is_dir():
        raise ConfigError("model: with an endpoint it should be a folder with the model's tokenizer", "model")

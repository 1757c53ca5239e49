"""Host names in settings: listening addresses, and lists of allowed hosts."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?")
_IPV4_LIKE = re.compile(r"[0-9.]+")


def _check_host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if not _NAME.fullmatch(text) or _IPV4_LIKE.fullmatch(text):
            raise ValueError("should be a host name or an IP address") from None
    return text


def _check_patterns(text: str) -> str:
    for name in filter(None, (part.strip() for part in text.split(","))):
        if not _NAME.fullmatch(name.removeprefix("*.")):
            raise ValueError("should be host names separated by commas; *.example.com means all below one")
    return text


HostName = Annotated[str, AfterValidator(_check_host)]
HostPatterns = Annotated[str, AfterValidator(_check_patterns)]

"""The alphabet of byte-level tokenizers."""

from __future__ import annotations

from functools import cache


@cache
def byte_characters() -> list[str]:
    """Return byte-level tokenizers' printable character for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]

"""Makes external text safe for displayed lines: it cannot forge a line, control a terminal or fill a disk."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return the text with each character that is neither visible nor a space as its escape sequence."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shortened(text: str, limit: int) -> str:
    """Return up to `limit` characters (50 or more), without the middle: the cause is often at the end."""
    if len(text) <= limit:
        return text
    note = f" ... ({len(text):,} characters) ... "
    half = (limit - len(note)) // 2
    return text[:half] + note + text[-half:]

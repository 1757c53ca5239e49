"""Standard technical English: words and phrases that this project does not use, in docs, docstrings, comments,
messages and names. `python -m tests.house.test_words` lists them."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache

from tests.conftest import ROOT
from tests.house.test_house import SOURCES, name, parsed

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md", "examples/*.md")
PROSE = {
    "is no X: is not an X": (
        r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!(?:longer|more|less|different|better|such)\b)[a-z]"
    ),
    "tell: report, show, return": r"\b(?:tells?|telling|told)\b(?! apart)",
    "whoever": r"\b[Ww]hoever\b",
    "ours: Pagemill's": r"\b(?:ours|of yours)\b",
    "nobody, somebody: name the process or person": r"\b(?:[Nn]obody|[Ss]omebody|[Ee]verybody|[Aa]nybody)\b",
    "submits: submissions, new jobs": (
        r"\b[Ss]ubmits (?:are|stop|raise|wait|of)\b|\b(?:of|the|take|accept|its|their) submits\b"
    ),
    ", else: otherwise, or": r", else\b",
    "go on: continue": r"\b(?:go|goes|gone|going|went) on\b(?! to\b)",
    "under way: in progress": r"\bunder way\b",
    "a start: startup": r"\b(?:[Aa]|[Ee]ach|[Ee]very) start\b(?! of\b)",
    "away: unavailable": r"\b(?:is|are|was|were) away\b",
    "for want of: for lack of": r"\bfor want of\b",
    "anew: again": r"\banew\b",
    "by turns: alternating, interleaved": r"\bby turns\b",
    "likeliest: most probable": r"\b(?:likeliest|idlest)\b",
    "gets nowhere: makes no progress": r"\bgets? (?:nowhere|anywhere)\b",
    "let go of: release": r"\b[Ll](?:et|ets|etting) go of\b",
    "apart by: separated by": r"\bapart by\b",
    "won't do: is invalid": r"\bwon't do\b|\bmakes? no sense\b",
    "mend: repair": r"\b[Mm]end(?:s|ed|ing)?\b",
    "by chance": r"\bby chance\b",
    "all the same: anyway": r"\ball the same\b",
    "in clear: unencrypted": r"\bin (?:the )?clear\b",
    "as ever": r"\bas ever\b",
    "shall: should, must": r"\bshall\b",
    "card: GPU": r"(?<!model )\b[Cc]ards?\b",
    "board: dashboard": r"\b[Bb]oards?\b",
}
"""Replacement -> pattern."""
ERRORS = {
    "an error starts with its object": r"^(?:it|its|they)\b",
    "is none: is not one of": r"\b(?:is|are) no(?:ne)?\b(?! longer)",
    "an error describes the problem first": r"^(?:give|say|name|choose)\b",
}
HELP = re.compile(
    r"(?:Of|As|Also|Beyond|With|Only|From|Further|Perhaps|Taken|What|Where|When|Who|Those|Their|Between|Times|Default|For"
    r"|The most|The same|\d+:|1;)(?!\w)"
)
"""Starts of help texts without a noun."""
NAMES = re.compile(
    r"_{0,2}(?:tell|told|hear|teach|settle|say|let_go|look|ask|whole|words|took|together|given|shown|kept|named"
    r"|one|outlook|asked|left|used|news|wanted|what_\w+|how_\w+|why_\w+|(?:tell|tells|say|settle|look|ask|hold|let|stand)_(?!up\b)\w+)"
)
MAX_NAMES = 2
"""Private words among the names of functions and classes. Lower it whenever there are fewer."""
_HELPED = {"gauge", "counter", "histogram", "engine_histogram"}


def _of_pages() -> Iterator[tuple[str, str]]:
    for page in sorted(page for pattern in PAGES for page in ROOT.glob(pattern)):
        is_code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_code ^= line.startswith("```")
            if not is_code and not line.startswith("```"):
                yield (
                    f"{name(page)}:{number}",
                    re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "CODE", line)),
                )


def _of_sources() -> Iterator[tuple[str, str]]:
    """Docstrings, comments, and strings that look like sentences."""
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for offset, line in enumerate(node.value.splitlines()):
                    yield f"{name(path)}:{node.lineno + offset}", re.sub(r"`[^`]*`", "CODE", line)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                yield f"{name(path)}:{token.start[0]}", re.sub(r"`[^`]*`", "CODE", token.string)


def _raised(node: ast.AST) -> str:
    """Return the text of a raised error; X represents values."""
    if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
        return ""
    parts = getattr(node.exc.args[0], "values", [node.exc.args[0]])
    return "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X"
        for part in parts
    )


def _helps(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    values = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
    if isinstance(node.func, ast.Name) and node.func.id in _HELPED:
        values += node.args[1:2]
    yield from (v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str))


@cache
def prose_hits() -> list[str]:
    found = [
        f"{place}: {rule}: {line.strip()[:120]}"
        for place, line in (*_of_pages(), *_of_sources())
        for rule, pattern in PROSE.items()
        if re.search(pattern, line)
    ]
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            place = f"{name(path)}:{getattr(node, 'lineno', 0)}"
            text = _raised(node)
            found += [
                f"{place}: {rule}: {text}" for rule, p in ERRORS.items() if " " in text and re.search(p, text)
            ]
            found += [
                f"{place}: a help text starts with a noun or verb: {t}" for t in _helps(node) if HELP.match(t)
            ]
    return found


@cache
def name_hits() -> list[str]:
    return [
        f"{name(path)}:{node.lineno}: name: {node.name}"
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and NAMES.fullmatch(node.name.lower())
    ]


def test_prose_is_standard_english() -> None:
    found = prose_hits()
    assert not found, "\n".join(found)


def test_private_words_among_names_only_become_fewer() -> None:
    assert len(name_hits()) <= MAX_NAMES, "\n".join(name_hits())


if __name__ == "__main__":
    sys.stdout.write("\n".join([*prose_hits(), *name_hits(), ""]))

"""docs/protocol.md matches the code; `python -m` with this module's name rewrites docs/submit.lua."""

from __future__ import annotations

import re
from pathlib import Path

from pagemill.common.error_codes import END_CODES, FINAL_CODES, RETRYABLE_CODES, ErrorCode
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server import scripts
from tests.conftest import ROOT
from tests.producer.driving import Queue

PAGE = ROOT / "docs" / "protocol.md"
SCRIPT = ROOT / "docs" / "submit.lua"


def test_the_script_next_to_the_page_is_current() -> None:
    assert SCRIPT.read_text(encoding="utf-8") == scripts.source("submit"), f"run python -m {__name__}"


def test_the_printed_example_works(queue: Queue) -> None:
    text = PAGE.read_text(encoding="utf-8")
    header, payload = re.findall(r"^     (\{.*\})$", text, re.MULTILINE)
    reply = queue.client.eval(
        SCRIPT.read_text(encoding="utf-8"), 1, queue.prefix, "", 1000000, header, payload
    )
    assert reply == b"created"
    (job,) = queue.pull(models=("smollm2",))
    assert job.payload == payload.encode()


def test_every_script_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = "".join(line for line in text.splitlines() if line.startswith("| `"))
    assert [name for name in scripts.names() if f"`{name}`" not in rows] == []


def test_every_key_has_a_row(queue: Queue) -> None:
    queue.submit("a", idempotency_key="k", metadata={"x": 1}, ttl=60.0)
    queue.submit("b", batch_id="b1", delay=60)
    queue.pull()
    text = PAGE.read_text(encoding="utf-8")
    for name in queue.names():
        word = name.split(":")[0]
        assert f"`{word}`" in text or f"`{word}:" in text, word


def test_the_rows_are_the_names_that_are_spelled() -> None:
    """By the scripts, after their prefix `P`, and by keys.py; the text after a colon is an id."""
    written = "".join(scripts.source(name) for name in scripts.names())
    spelled = set(re.findall(r"\bP \.\. '(\w+:?)", written))
    spelled |= set(re.findall(r"prefix\(queue\)\}(\w+:?)", Path(keys.__file__).read_text()))
    rows = re.findall(r"^\| (`.*?`) \| (?:string|hash|list|set|sorted set)", PAGE.read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+:?)", row)}
    channels = set(
        re.findall(r"`(\w+)`\s\(", PAGE.read_text().partition("\nChannels, ")[2].partition("\n\n")[0])
    )
    assert spelled == listed | channels


def test_every_field_of_a_record_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = "".join(scripts.source(name) for name in scripts.names())
    kept = " ".join(re.findall(r"^keep_fields\((.*?)\)$", written, re.DOTALL | re.MULTILINE))
    fields = {name for names in re.findall(r"'([^']*)'", kept) for name in names.split()}
    for arguments in re.findall(r"'HSET', P \.\. 'job:' \.\. [\w.]+, ([^()]+)", written):
        fields |= {name.strip("'") for name in arguments.split(", ")[::2] if name.startswith("'")}
    assert {"relay", "crashes", "replayed_as", "after", "estimate"} <= fields
    described = text[text.index("Fields of `job:<id>`") : text.index("Names: a queue is")]
    assert [name for name in sorted(fields) if f"`{name}`" not in described] == []


def test_every_error_code_is_of_one_kind() -> None:
    kinds = (FINAL_CODES, RETRYABLE_CODES, END_CODES)
    assert sum(len(kind) for kind in kinds) == len(frozenset().union(*kinds))
    assert frozenset().union(*kinds) == frozenset(ErrorCode.__args__)  # type: ignore[attr-defined]


if __name__ == "__main__":
    SCRIPT.write_text(scripts.source("submit"), encoding="utf-8")

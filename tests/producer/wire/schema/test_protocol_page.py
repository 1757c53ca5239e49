"""docs/protocol.md says what the code does; `python -m` with this module's name rewrites its rows."""

from __future__ import annotations

import re
from pathlib import Path

from pagemill.error_codes import END_CODES, FINAL_CODES, RETRYABLE_CODES, ErrorCode
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server import scripts
from tests.conftest import ROOT
from tests.producer.driving import Queue

PAGE = ROOT / "docs" / "protocol.md"
SCRIPT = re.compile(r"(<!-- submit.lua begins -->\n```lua\n)(.*?)(```\n<!-- submit.lua ends -->)", re.DOTALL)


def printed_script() -> str:
    found = SCRIPT.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found[2]


def test_the_page_prints_the_submit_script() -> None:
    assert printed_script() == scripts.source("submit")


def test_the_printed_example_works(queue: Queue) -> None:
    text = PAGE.read_text(encoding="utf-8")
    header, payload = re.findall(r"^     (\{.*\})$", text, re.MULTILINE)
    reply = queue.client.eval(printed_script(), 1, queue.prefix, "", 1000000, header, payload)
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
    """By the scripts, after their prefix `P`, and by keys.py; what comes after a colon is an id."""
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
    listed = re.search(r"local OPTIONAL = \{(.*?)\}", written, re.DOTALL)
    assert listed is not None
    fields = set(re.findall(r"'([a-z_]+)'", listed[1]))
    for arguments in re.findall(r"'HSET', P \.\. 'job:' \.\. [\w.]+, ([^()]+)", written):
        fields |= {name.strip("'") for name in arguments.split(", ")[::2] if name.startswith("'")}
    assert {"relay", "crashes", "replayed_as"} <= fields
    described = text[text.index("Fields of `job:<id>`") : text.index("Names: a queue is")]
    assert [name for name in sorted(fields) if f"`{name}`" not in described] == []


def test_every_error_code_is_of_one_kind() -> None:
    kinds = (FINAL_CODES, RETRYABLE_CODES, END_CODES)
    assert sum(len(kind) for kind in kinds) == len(frozenset().union(*kinds))
    assert frozenset().union(*kinds) == frozenset(ErrorCode.__args__)  # type: ignore[attr-defined]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SCRIPT.sub(lambda m: m[1] + scripts.source("submit") + m[3], page), encoding="utf-8")

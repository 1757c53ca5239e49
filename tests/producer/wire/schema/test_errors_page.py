"""docs/errors.md explains every error code and every exception."""

from __future__ import annotations

import re
from pathlib import Path

from pagemill.common.error_codes import END_CODES, FINAL_CODES, RETRYABLE_CODES
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.wire.schema import errors
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
GATEWAY = ROOT / "producer" / "gateway"
DATASET = ROOT / "producer" / "dataset"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def sources(folder: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


def test_every_code_has_one_row_with_its_kind() -> None:
    kinds = {"final": FINAL_CODES, "retried": RETRYABLE_CODES, "ended": END_CODES}
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .+ \|", section("Error codes of jobs"), re.MULTILINE)
    expected = [(code, kind) for kind, codes in kinds.items() for code in codes]
    assert sorted(rows) == sorted(expected)


def test_every_exception_has_one_row() -> None:
    named = re.findall(r"^\| `(\w+)` ", section("Exceptions of the client"), re.MULTILINE)
    raised = {
        name
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.PagemillError)
    }
    assert sorted(named) == sorted(raised - {"PagemillError", "JobError"} | {DatasetError.__name__})


def test_every_code_of_the_gateway_is_listed_with_its_status() -> None:
    text = sources(GATEWAY)
    raised = set(
        re.findall(r"(?:ApiError|retry_later)\(\s*(\d{3}),\s*(?:f?\"[^\"]*\"|[\w()]+),\s*\"(\w+)\"", text)
    )
    raised |= {("404", f"{kind}_not_found") for kind in re.findall(r"not_found\(\"(\w+)\"", text)}
    assert len(raised) > 40
    rows = re.findall(r"^\| (\d{3})[^|]* \| (.+) \|$", section("Error codes of the gateway"), re.MULTILINE)
    listed = {(status, code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    jobs = FINAL_CODES | RETRYABLE_CODES | END_CODES
    assert sorted((status, code) for status, code in raised - listed if code not in jobs) == []


def test_every_code_of_a_row_is_listed() -> None:
    called = set(re.findall(r"RowError\(\s*\"(\w+)\"", sources(DATASET))) | {"output_cut_off"}
    called |= {"budget_exhausted", "api_denied", "api_error", "no_label"}
    listed = set(re.findall(r"`(\w+)`", section("Error codes of dataset rows")))
    assert sorted(called - listed - FINAL_CODES) == []

"""Tries every `model_type` of transformers' causal language models that no registered family names.

`python -m tests.engine.models.generic.sweep [TYPE ...]` writes outcomes.json, in a few minutes for all types,
and the resulting lists in docs/models.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from pagemill.engine.models.families.multimodal import MULTIMODAL
from pagemill.engine.models.families.refusals import kind_of
from pagemill.engine.models.families.registry import SUPPORTED_MODEL_TYPES
from tests.conftest import ROOT
from tests.engine.models.generic.trial import Outcome, try_type

STORED = Path(__file__).with_name("outcomes.json")
PAGE = ROOT / "docs" / "models.md"
_BEGIN, _END = "<!-- tried: begin -->\n", "<!-- tried: end -->\n"


def tried_types() -> list[str]:
    """Return the types that the generic family handles."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(SUPPORTED_MODEL_TYPES))


def stored_outcomes() -> tuple[str, dict[str, Outcome]]:
    """Return transformers' version and the outcome of each type."""
    content = json.loads(STORED.read_text())
    return content["transformers"], {kind: Outcome(**fields) for kind, fields in content["types"].items()}


def multimodal_outcomes() -> dict[str, str | None]:
    """Return the reason why the text of each multimodal type is rejected; None: it is as exact as its text type."""
    _, outcomes = stored_outcomes()
    refusals = {kind: outcomes[kind].refusal for kind in outcomes if kind not in SUPPORTED_MODEL_TYPES}
    return {kind: refusals.get(row.loaded_type) for kind, row in MULTIMODAL.items()}


def section(version: str, outcomes: dict[str, Outcome]) -> str:
    """Return the lists of docs/models.md."""
    exact = {kind: outcome for kind, outcome in outcomes.items() if outcome.refusal is None}
    dense = [kind for kind, outcome in exact.items() if not outcome.has_experts]
    mixed = [kind for kind, outcome in exact.items() if outcome.has_experts]
    refused = sorted(
        (_kind_name(outcome.refusal), kind)
        for kind, outcome in outcomes.items()
        if outcome.refusal is not None
    )
    lines = [
        f"transformers {version}: {len(outcomes)} types beside the registered ones; {len(dense)} dense ones and "
        f"{len(mixed)} with experts are exact, {len(refused)} are refused.",
        "",
        "| Outcome | model_type |",
        "| --- | --- |",
        f"| exact | {', '.join(dense)} |",
        f"| exact, with experts | {', '.join(mixed)} |",
    ]
    texts = [kind for kind, why in multimodal_outcomes().items() if why is None]
    lines.append(f"| exact, the text of {len(texts)} multimodal types | {', '.join(texts)} |")
    for name, group in groupby(refused, key=lambda entry: entry[0]):
        lines.append(f"| refused: {name} | {', '.join(kind for _, kind in group)} |")
    return "\n".join(lines) + "\n"


def _kind_name(reason: str) -> str:
    kind = kind_of(reason)
    assert kind is not None, f"no kind of refusal has this reason: {reason}"
    return kind.name


def page() -> str:
    """Return docs/models.md with its lists generated from the stored outcomes."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + section(*stored_outcomes()) + _END + after


def _without_registered(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    return {kind: outcome for kind, outcome in outcomes.items() if kind not in SUPPORTED_MODEL_TYPES}


def main(chosen: list[str]) -> None:
    transformers_logging.set_verbosity_error()
    version, outcomes = stored_outcomes() if STORED.exists() and chosen else (transformers.__version__, {})
    for kind in chosen or tried_types():
        with tempfile.TemporaryDirectory() as directory:
            os.environ["PAGEMILL_CACHE_DIR"] = directory
            try:
                outcomes[kind] = try_type(kind, Path(directory))
            except Exception as error:
                sys.stderr.write(f"{kind}: {error!r}\n")
                continue
        sys.stderr.write(f"{kind}: {outcomes[kind].refusal or 'exact'}\n")
    outcomes = _without_registered(outcomes)
    types = {kind: asdict(outcomes[kind]) for kind in sorted(outcomes)}
    STORED.write_text(json.dumps({"transformers": version, "types": types}, indent=1) + "\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])

"""MaskBench (github.com/guidance-ai/jsonschemabench): few schemas of a sample are rejected, no invalid value passes.

No package registry has its data: MASKBENCH_DATA names a copy of its folder maskbench/data.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from pagemill.common.bounds import InvalidParameter
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import InvalidRequest
from tests.engine.structured_output.test_rewritten import compiled, verdict

NUM_SCHEMAS = 300
LONGEST_VALUE = 4000
MOST_REJECTED = 0.03
"""1.3% of a larger sample are."""
MOST_VALID_REFUSED = 0.06
"""3% of a larger sample are, most of them because of the order of their properties, which a grammar fixes."""


@pytest.mark.slow
@pytest.mark.skipif("MASKBENCH_DATA" not in os.environ, reason="needs MASKBENCH_DATA, a folder of MaskBench")
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")  # of a pattern
def test_a_sample_of_maskbench() -> None:
    paths = sorted(Path(os.environ["MASKBENCH_DATA"]).glob("*.json"))
    assert len(paths) >= NUM_SCHEMAS
    rejected: list[tuple[str, str]] = []
    accepted: list[str] = []
    refused: list[str] = []
    num_valid = num_invalid = 0
    for path in random.Random(49).sample(paths, NUM_SCHEMAS):
        case = json.loads(path.read_text())
        try:
            StructuredOutputs(json=json.dumps(case["schema"]))
            schema = compiled(case["schema"])
        except (InvalidRequest, InvalidParameter) as error:
            rejected.append((path.name, str(error)))
            continue
        for test in case.get("tests", ()):
            if len(json.dumps(test["data"])) > LONGEST_VALUE:
                continue
            passes = verdict(schema, test["data"]) == "accepted"
            num_valid += test["valid"]
            num_invalid += not test["valid"]
            if passes and not test["valid"]:
                accepted.append(path.name)
            elif test["valid"] and not passes:
                refused.append(path.name)
    assert not accepted
    assert num_valid > NUM_SCHEMAS / 2 < num_invalid
    assert len(rejected) <= MOST_REJECTED * NUM_SCHEMAS, rejected
    assert len(refused) <= MOST_VALID_REFUSED * num_valid, refused

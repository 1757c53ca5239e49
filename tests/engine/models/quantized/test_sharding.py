"""A quantized model over two ranks: split at complete groups as it is stored, otherwise dequantized."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.models.quantized.checkpoints import FORMATS, write_pair
from tests.engine.models.quantized.test_exactness import answers

slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gptq-zeros",
        "gptq-act-order",
        "awq",
        "w4a16-zeros",  # half of o_proj's inputs are half a group
        "fp8-blocks",
        "mxfp4",
    ],
)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    stored, plain = write_pair(tmp_path, FORMATS[name][0])
    found, expected = answers(stored, tensor_parallel_size=2), answers(plain, tensor_parallel_size=2)
    for (tokens, logprobs), (plain_tokens, plain_logprobs) in zip(found, expected, strict=True):
        assert tokens == plain_tokens
        assert [one.logprob for one in logprobs] == pytest.approx(
            [one.logprob for one in plain_logprobs], abs=1e-5
        )

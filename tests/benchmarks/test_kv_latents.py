from __future__ import annotations

import pytest
import torch

from benchmarks.kv import latents
from benchmarks.kv.latents import step_time, token_bytes


def test_bytes_are_those_of_the_published_shapes() -> None:
    lite, whole = (token_bytes(model, torch.bfloat16) for model in ("DeepSeek-V2-Lite", "DeepSeek-V3"))
    assert (lite.latents, lite.keys_and_values) == (27 * 576 * 2, 27 * 16 * (192 + 128) * 2)
    assert (whole.latents, whole.keys_and_values) == (61 * 576 * 2, 61 * 128 * (192 + 128) * 2)
    assert token_bytes("DeepSeek-V3", torch.int8).latents == 61 * (576 + 4)


@pytest.mark.slow
def test_both_engines_take_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "_SMALL", latents._SMALL | {"hidden_size": 64, "intermediate_size": 64})
    taken = step_time(rows=2, context=20, steps=3)
    assert min(taken.latents, taken.keys_and_values, taken.prompt_latents) > 0

"""Decoders that no registered family describes: exact or rejected with their name, as docs/models.md states."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.models.generic.sweep import PAGE, page, stored_outcomes, tried_types
from tests.engine.models.generic.trial import try_type

VERSION, OUTCOMES = stored_outcomes()
IS_SAME_VERSION = transformers.__version__ == VERSION
# One for each attention variant: windows by layer, keys wider than values, layers with two attentions, keys
# shared by layers, windows that only the mask knows, sinks; and one for each kind of rejection.
REPRESENTATIVES = (
    "cohere2", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "gemma3n_text", "granite", "granite_swa", "minicpm3",
    "modernbert-decoder", "olmo2", "bart", "doge", "falcon_h1", "hrm_text", "jamba",
    "laguna", "llama4_text", "qwen3_5", "recurrent_gemma", "roberta", "rwkv", "openai-gpt", "xlm", "zaya",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(kind, marks=() if kind in REPRESENTATIVES else pytest.mark.slow) for kind in OUTCOMES],
)
def test_a_type_is_exact_or_refused_by_name(model_type: str, tmp_path: Path) -> None:
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    outcome = try_type(model_type, tmp_path)
    assert outcome == OUTCOMES[model_type] or not IS_SAME_VERSION


def test_every_type_has_been_tried() -> None:
    if not IS_SAME_VERSION:
        pytest.skip(f"the lists are of transformers {VERSION}")
    assert sorted(OUTCOMES) == tried_types()


def test_most_decoders_are_exact() -> None:
    exact = [outcome for outcome in OUTCOMES.values() if outcome.refusal is None]
    assert sum(not outcome.has_experts for outcome in exact) > 40
    assert len(exact) > 100


def test_the_committed_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.engine.models.generic.sweep"

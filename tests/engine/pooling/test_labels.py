"""Labels and scores equal transformers' own, and a cross-encoder's equal Sentence Transformers'."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pagemill.engine.errors import ModelLoadError, UnsupportedFeature
from pagemill.engine.pooling.input_processor import PoolInput
from tests.engine.pooling.tiny_pooling import (
    DECODERS,
    ENCODERS,
    engine_of,
    run,
    save_base,
    texts_of_all_lengths,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of scikit-learn and scipy, at their import
    from sentence_transformers import CrossEncoder

TEXTS = texts_of_all_lengths(24, 20)
QUERY = "w3 w1 w4 w1 w5"
FAMILIES = {name: config for name, config in (ENCODERS | DECODERS).items() if name != "qwen2"}
"""Qwen2's tokenizer supports only bytes, regardless of the directory."""


def saved(directory: Path, name: str, num_labels: int, **fields: Any) -> Any:
    config = deepcopy(FAMILIES[name])
    config.num_labels = num_labels
    for field, value in fields.items():
        setattr(config, field, value)
    return save_base(directory, config, AutoModelForSequenceClassification)


def logits(directory: Path, model: Any, texts: list[Any]) -> torch.Tensor:
    """One text at a time, so that no text is padded."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = []
    for text in texts:
        given = (
            tokenizer(*text, return_tensors="pt")
            if isinstance(text, tuple)
            else tokenizer(text, return_tensors="pt")
        )
        with torch.no_grad():
            rows.append(model(**given).logits[0])
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_classifier(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name, 3)
    found = run(engine_of(tmp_path, max_num_batched_tokens=100), "classify", TEXTS)
    wanted = logits(tmp_path, model, TEXTS).softmax(-1).numpy()
    assert np.abs(found - wanted).max() < 1e-5
    assert np.ptp(found, axis=0).max() > 0.001, "the texts' labels differ"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "mpnet", "modernbert", "electra"])
def test_every_cross_encoder(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name, 1)
    engine = engine_of(tmp_path)
    assert engine.input_processor.kinds == ("rerank", "classify")
    found = run(engine, "rerank", TEXTS, query=QUERY)
    pairs = [(QUERY, text) for text in TEXTS]
    raw = logits(tmp_path, model, pairs)
    assert np.abs(found - raw.sigmoid().numpy()).max() < 1e-5
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    assert np.abs(found[:, 0] - theirs.predict(pairs)).max() < 1e-5
    assert np.abs(run(engine, "classify", TEXTS, query=QUERY) - raw.numpy()).max() < 1e-4


def test_a_saved_cross_encoder_keeps_its_activation(tmp_path: Path) -> None:
    saved(tmp_path / "base", "bert", 1)
    theirs = CrossEncoder(str(tmp_path / "base"), device="cpu", activation_fn=torch.nn.Identity())
    theirs.save_pretrained(str(tmp_path / "saved"))
    config = tmp_path / "saved/config.json"
    content = json.loads(config.read_text())
    content["sentence_transformers"] = {
        "activation_fn": "torch.nn.modules.linear.Identity",
        "version": "4.1.0",
    }
    config.write_text(json.dumps(content))
    pairs = [(QUERY, text) for text in TEXTS]
    found = run(engine_of(tmp_path / "saved"), "rerank", TEXTS, query=QUERY)
    assert np.abs(found[:, 0] - theirs.predict(pairs)).max() < 1e-5
    content["sentence_transformers"] = {"activation_fn": "os.abort"}
    config.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"activation 'os.abort' is not known"):
        engine_of(tmp_path / "saved")


def test_each_label_alone(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert", 4, problem_type="multi_label_classification")
    found = run(engine_of(tmp_path), "classify", TEXTS)
    assert np.abs(found - logits(tmp_path, model, TEXTS).sigmoid().numpy()).max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_reward_model_gives_its_raw_number(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name, 1)
    found = run(engine_of(tmp_path), "classify", TEXTS)
    assert np.abs(found - logits(tmp_path, model, TEXTS).numpy()).max() < 1e-4


def test_modernbert_s_mean(tmp_path: Path) -> None:
    model = saved(tmp_path, "modernbert", 3, classifier_pooling="mean")
    found = run(engine_of(tmp_path), "classify", TEXTS)
    assert np.abs(found - logits(tmp_path, model, TEXTS).softmax(-1).numpy()).max() < 1e-5


def test_long_pairs_are_cut_as_theirs(tmp_path: Path) -> None:
    saved(tmp_path, "bert", 1)
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    documents = [" ".join(["w1", "w2", "w7"] * 40), "w9"]
    found = run(engine_of(tmp_path), "rerank", documents, query=QUERY, truncate=True)
    assert np.abs(found[:, 0] - theirs.predict([(QUERY, text) for text in documents])).max() < 1e-5


def test_several_labels_make_no_order(tmp_path: Path) -> None:
    saved(tmp_path, "bert", 3)
    processor = engine_of(tmp_path).input_processor
    with pytest.raises(
        UnsupportedFeature,
        match="classifies texts and does not accept rerank jobs: submit with task classify",
    ):
        processor.process_pool(PoolInput(kind="rerank", texts=["w1"], query="w2"))
    with pytest.raises(UnsupportedFeature, match="dimensions"):
        processor.process_pool(PoolInput(kind="classify", texts=["w1"], dimensions=2))
    assert processor.labels == ("LABEL_0", "LABEL_1", "LABEL_2")

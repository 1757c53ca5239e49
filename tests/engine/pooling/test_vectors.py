"""Vectors equal Sentence Transformers', for any model, pooling and combination of texts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from pagemill.engine.errors import InvalidRequest, ModelLoadError, PromptTooLong, UnsupportedFeature
from pagemill.engine.pooling.input_processor import PoolInput
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.pooling.tiny_pooling import (
    DECODERS,
    ENCODERS,
    closest,
    engine_of,
    run,
    save_base,
    texts_of_all_lengths,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of scikit-learn and scipy, at their import
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as st

TEXTS = texts_of_all_lengths()
EXACT = 0.99999


def saved(directory: Path, config: Any, modes: Any, *further: Any, **options: Any) -> SentenceTransformer:
    """A Sentence Transformers directory, and the library's object for it."""
    save_base(directory / "base", config, AutoModel)
    pooling = st.Pooling(config.hidden_size, modes, **options.pop("pooling", {}))
    transformer = st.Transformer(str(directory / "base"))
    theirs = SentenceTransformer(modules=[transformer, pooling, *further], device="cpu", **options)
    theirs.save(str(directory / "model"))
    return theirs


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder(tmp_path: Path, name: str) -> None:
    theirs = saved(tmp_path, ENCODERS[name], "mean", st.Normalize())
    wanted = theirs.encode(TEXTS)
    for budget in (48, 2048):  # several batches, and one
        engine = engine_of(tmp_path / "model", max_num_batched_tokens=budget)
        found = run(engine, "embed", TEXTS)
        assert closest(found, wanted) >= EXACT
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert closest(found[:-1], found[1:]) < 0.999, "the texts' vectors differ"


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder(tmp_path: Path, name: str) -> None:
    theirs = saved(tmp_path, DECODERS[name], "lasttoken", st.Normalize())
    engine = engine_of(tmp_path / "model", max_num_batched_tokens=256)
    if name != "qwen2":  # its tokenizer supports only bytes, regardless of the directory
        found = run(engine, "embed", TEXTS)
        assert closest(found, theirs.encode(TEXTS)) >= EXACT
        assert closest(found[:-1], found[1:]) < 0.999, "the texts' vectors differ"
    ids = [[5 + (number * place) % 40 for place in range(1, number)] for number in range(2, 30)]
    base = AutoModel.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        wanted = [base(torch.tensor([each])).last_hidden_state[0, -1].numpy() for each in ids]
    assert closest(run(engine, "embed", ids), wanted) >= EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "modes",
    ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("cls", "mean", "max")],
)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_pooling(tmp_path: Path, modes: Any, include_prompt: bool) -> None:
    theirs = saved(
        tmp_path,
        ENCODERS["bert"],
        modes,
        pooling={"include_prompt": include_prompt},
        prompts={"query": "query: w1 ", "passage": "passage: "},
        default_prompt_name="passage",
    )
    engine = engine_of(tmp_path / "model")
    assert closest(run(engine, "embed", TEXTS), theirs.encode(TEXTS)) >= EXACT
    found = run(engine, "embed", TEXTS, prompt_name="query")
    assert closest(found, theirs.encode(TEXTS, prompt_name="query")) >= EXACT


def test_dense_and_norm_modules(tmp_path: Path) -> None:
    torch.manual_seed(2)
    further = [
        st.Dense(32, 24),
        st.LayerNorm(24),
        st.Dense(24, 16, bias=False, activation_function=torch.nn.Identity()),
    ]
    theirs = saved(tmp_path, ENCODERS["bert"], "mean", *further, st.Normalize())
    assert closest(run(engine_of(tmp_path / "model"), "embed", TEXTS), theirs.encode(TEXTS)) >= EXACT


def test_fewer_dimensions_are_normalised_again(tmp_path: Path) -> None:
    theirs = saved(tmp_path, ENCODERS["bert"], "mean", st.Normalize())
    found = run(engine_of(tmp_path / "model"), "embed", TEXTS, dimensions=8)
    wanted = theirs.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    assert found.shape == (len(TEXTS), 8)
    assert np.abs(found - wanted).max() < 1e-5


def test_a_bare_encoder_gives_the_mean(tmp_path: Path) -> None:
    save_base(tmp_path, ENCODERS["bert"], AutoModel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = SentenceTransformer(str(tmp_path), device="cpu")
    assert closest(run(engine_of(tmp_path), "embed", TEXTS), theirs.encode(TEXTS)) >= EXACT


def test_a_pad_token_inside_a_text(tmp_path: Path) -> None:
    """fairseq's positions skip it."""
    theirs = saved(tmp_path, ENCODERS["roberta"], "mean")
    text = "w1 w2 <pad> w3 w4"
    assert closest(run(engine_of(tmp_path / "model"), "embed", [text]), theirs.encode([text])) >= EXACT


def test_too_long_texts_are_refused_or_cut(tmp_path: Path) -> None:
    theirs = saved(tmp_path, ENCODERS["bert"], "mean")
    engine = engine_of(tmp_path / "model")
    long = " ".join(["w1", "w2", "w3"] * 40)
    with pytest.raises(PromptTooLong, match=r"text 1 has 122 tokens, the model takes 60: .* truncate"):
        run(engine, "embed", ["w1", long])
    assert closest(run(engine, "embed", [long, "w1"], truncate=True), theirs.encode([long, "w1"])) >= EXACT


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path, ENCODERS["bert"], "mean")
    engine = engine_of(tmp_path / "model")
    found = run(engine, "embed", ["w1 w2", [1, 5, 6, 2]])
    assert np.abs(found[0] - found[1]).max() < 1e-6


@pytest.mark.slow
def test_the_real_model(minilm: Path) -> None:
    theirs = SentenceTransformer(str(minilm), device="cpu")
    texts = [
        "A man is eating food.", "", "Der schnelle braune Fuchs springt über den faulen Hund, 速い茶色の狐 🦊",
        "word " * 100, "The quick brown fox.", "x" * 300, "long " * 400,
    ]  # fmt: skip
    found = run(engine_of(minilm), "embed", texts, truncate=True)
    assert closest(found, theirs.encode(texts)) >= EXACT


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"texts": []}, InvalidRequest, "the job has no text"),
        ({"texts": [[]]}, InvalidRequest, "the text has no tokens"),
        ({"texts": ["w1", [10**6]]}, InvalidRequest, r"text 1: token ids must be in \[0, 57\)"),
        ({"texts": [[-1]]}, InvalidRequest, "token ids must be in"),
        ({"texts": [[True]]}, InvalidRequest, "must be integers"),
        ({"texts": ["\ud800"]}, InvalidRequest, "not valid Unicode"),
        ({"texts": ["a"], "dimensions": 0}, InvalidRequest, "vectors have 32, ask for 1 to 32"),
        ({"texts": ["a"], "dimensions": 33}, InvalidRequest, "vectors have 32, ask for 1 to 32"),
        ({"texts": ["a"], "prompt_name": "q"}, InvalidRequest, "no such prompt; it has document, query"),
        (
            {"texts": ["a"], "kind": "rerank"},
            UnsupportedFeature,
            "gives vectors and does not accept rerank jobs",
        ),
        ({"texts": ["a"], "kind": "classify"}, UnsupportedFeature, "submit with task embed"),
    ],
)
def test_bad_requests(tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str) -> None:
    saved(tmp_path, ENCODERS["bert"], "mean")
    processor = engine_of(tmp_path / "model").input_processor
    with pytest.raises(error, match=message):
        processor.process_pool(PoolInput(**({"kind": "embed"} | fields)))
    with pytest.raises(UnsupportedFeature, match="does not accept generate jobs: submit with task embed"):
        processor.process(prompt="a", params=SamplingParams())
    with pytest.raises(UnsupportedFeature, match="does not accept score jobs"):
        processor.process_score(prompt="a", params=SamplingParams())


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_hostile_directories(tmp_path: Path) -> None:
    saved(tmp_path, ENCODERS["bert"], "mean", st.Dense(32, 16))
    model = tmp_path / "model"
    listed = json.loads((model / "modules.json").read_text())

    def refusal() -> str:
        with pytest.raises(ModelLoadError) as refused:
            engine_of(model)
        return str(refused.value)

    for kind in (
        "os.system",
        "custom_st.Transformer",
        "sentence_transformers.models.Evil",
        "subprocess.Popen",
    ):
        (model / "modules.json").write_text(json.dumps([listed[0], listed[1] | {"type": kind}]))
        assert f"module {kind!r} is not known, and no code of a model is run" in refusal()
    (model / "modules.json").write_text(json.dumps([listed[0], listed[1] | {"path": "../../../etc"}]))
    assert "is outside the model's directory" in refusal()
    for nonsense in ("{}", "[]", "[1]", "[" * 100_000, "not json", json.dumps(listed * 20)):
        (model / "modules.json").write_text(nonsense)
        assert "modules.json" in refusal()
    (model / "modules.json").write_text(json.dumps(listed[1:]))
    assert "the first module is Pooling" in refusal()
    (model / "modules.json").write_text(json.dumps(listed))
    change(model / "2_Dense/config.json", activation_function="os.system")
    assert "activation 'os.system' is not known" in refusal()
    change(
        model / "2_Dense/config.json", activation_function="torch.nn.modules.activation.Tanh", in_features=31
    )
    assert "it takes 31 numbers, and is given 32" in refusal()
    change(model / "1_Pooling/config.json", pooling_mode="attention")
    assert "pooling" in refusal()
    assert "is not known; known: cls" in refusal()


def test_numbers_that_are_not_finite_fail_alone(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", ENCODERS["bert"], AutoModel)
    with torch.no_grad():
        base.embeddings.word_embeddings.weight[9] = float("nan")
    base.save_pretrained(tmp_path / "base")
    engine = engine_of(tmp_path / "base")
    for name, ids in (("bad", [1, 9, 2]), ("good", [1, 8, 2])):
        token_ids, params, task = engine.input_processor.process_pool(PoolInput(kind="embed", texts=[ids]))
        engine.add_request(name, token_ids, params, task=task)
    outputs = {output.request_id: output for output in engine.step()}
    assert (outputs["bad"].error_code, outputs["good"].error_code) == ("output_invalid", None)
    assert outputs["good"].pooled is not None
    assert engine.stats().scheduler.invalid_logits == 1


@pytest.mark.parametrize("name", ["bert", "qwen2"])
def test_bfloat16_products(name: str, tmp_path: Path) -> None:
    config = (ENCODERS | DECODERS)[name]
    saved(tmp_path, config, "mean", st.Normalize())
    ids = [[5 + (number * place) % 40 for place in range(1, number)] for number in range(2, 30)]
    exact = run(engine_of(tmp_path / "model", dtype="float32"), "embed", ids)
    rounded = run(engine_of(tmp_path / "model", dtype="bfloat16"), "embed", ids)
    assert not np.array_equal(exact, rounded)
    assert closest(exact, rounded) > 0.99

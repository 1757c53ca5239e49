"""A tokenizer and a configuration with ids that the model lacks, as fine-tuned models often have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary
from pagemill.engine.text.tokenizer import HuggingFaceTokenizer
from tests.engine.models.families.native_cases import write_llama

VOCAB_SIZE = 49152


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of smollm2's vocabulary. Its tokenizer has a padding token beyond it, its EOS list odd ids."""
    eos = [-1, 2, VOCAB_SIZE, 99_999_999]
    directory = write_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, eos_token_id=eos)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(packaged_model_directory() / name, directory / name)
    described = json.loads((directory / "tokenizer.json").read_text())
    described["added_tokens"].append(described["added_tokens"][0] | {"id": VOCAB_SIZE, "content": "[PAD]"})
    (directory / "tokenizer.json").write_text(json.dumps(described))
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), num_kv_blocks=64, num_threads=1, max_model_len=128)


def test_such_ids_end_no_output(llm: LLM) -> None:
    assert llm.engine.input_processor._limits.eos_token_ids == (2,)
    choice = StructuredOutputs(choice=("yes", "yes no"))
    free, forced = (
        SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=choice, logit_bias=bias)
        for bias in ({}, {2: 1000.0})
    )
    assert llm.generate("x", forced, use_tqdm=False)[0].outputs[0].text == "yes"
    assert llm.generate("x", free, use_tqdm=False)[0].outputs[0].text in choice.choice  # type: ignore[operator]
    late = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4, logit_bias={2: 1000.0})
    assert len(llm.generate("x", late, use_tqdm=False)[0].outputs[0].token_ids) == 5


def test_structured_outputs_work(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(json={"enum": ["[PAD]", 7]}))
    assert json.loads(llm.generate("x", params, use_tqdm=False)[0].outputs[0].text) in ("[PAD]", 7)


def test_such_a_bad_word_changes_no_other_request(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={0: 1000.0}, skip_special_tokens=False)
    padded = SamplingParams(temperature=0.0, max_tokens=3, bad_words=("[PAD]",))
    alone = llm.generate("y", plain, use_tqdm=False)[0].outputs[0].token_ids
    for order in ([padded, plain], [plain, padded]):
        results = llm.generate(["y", "y"], order, use_tqdm=False)
        assert results[order.index(plain)].outputs[0].token_ids == alone == [0, 0, 0]


def test_merges_and_pieces_of_unknown_tokens_are_left_out(checkpoint: Path) -> None:
    """The last pieces of a byte-level vocabulary are results of merges, which the grammar library checks."""
    tokenizer = HuggingFaceTokenizer(checkpoint)
    vocabulary = GrammarVocabulary.from_tokenizer(tokenizer, VOCAB_SIZE - 200, (2,))
    assert vocabulary is not None
    assert vocabulary.build().vocab_size == VOCAB_SIZE - 200
    assert "[PAD]" not in vocabulary.special_names()

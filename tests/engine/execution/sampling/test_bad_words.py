"""`bad_words`: their tokenization, and their absence from outputs."""

from __future__ import annotations

import pytest

from pagemill.engine.errors import UnsupportedFeature
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.input_processor import InputLimits, InputProcessor
from pagemill.engine.text.tokenizer import HuggingFaceTokenizer

LIMITS = InputLimits(vocab_size=49152, max_model_len=64, pool_tokens=256, max_num_seqs=4)


def test_a_word_is_barred_with_and_without_a_space_before_it() -> None:
    tokenizer = HuggingFaceTokenizer(packaged_model_directory())
    processor = InputProcessor(tokenizer, LIMITS)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert processor.bad_word_ids(("Paris",)) == (ids("Paris"), ids(" Paris"))
    assert ids("Paris") != ids(" Paris")
    rare = "incomprehensibilities"
    assert len(ids(rare)) > 1
    assert processor.bad_word_ids((rare, " Paris")) == (
        ids(rare),
        ids(f" {rare}"),
        ids("Paris"),
        ids(" Paris"),
    )
    assert processor.bad_word_ids(("Paris", " Paris")) == (ids("Paris"), ids(" Paris")), "each once"
    assert processor.bad_word_ids((" ",)) == (ids(" "), ids("  "))
    assert processor.bad_word_ids(()) == ()


def test_they_need_a_tokenizer() -> None:
    with pytest.raises(UnsupportedFeature, match="tokenizer"):
        InputProcessor(None, LIMITS).process(prompt_token_ids=[1], params=SamplingParams(bad_words=("a",)))


@pytest.mark.slow
def test_a_word_of_several_tokens_does_not_come_and_its_beginning_may() -> None:
    llm = LLM("smollm2", num_kv_blocks=64, num_threads=1)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None

    def write(*bad_words: str) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=2.0, bad_words=bad_words)
        (result,) = llm.generate("The three animals in the garden were a", params, use_tqdm=False)
        return result.outputs[0].token_ids

    free = write()
    assert len(set(free)) == 6
    word = tokenizer.decode(free[1:4])  # a part of its own output
    barred = write(word)
    assert word.strip() not in tokenizer.decode(barred)
    assert barred[:3] == free[:3], "only the last token of the word may not come"

"""`choice`: the output is one of the labels, and what is certain is not sampled."""

from __future__ import annotations

import pytest

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams, StructuredOutputs
from pagemill.engine.structured_output.choice import ChoiceCompiler, ChoiceGrammar, build_choice_trie
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer

EOS = 9


def grammar(*labels: list[int], eos: int | None = EOS) -> ChoiceGrammar:
    return ChoiceGrammar(build_choice_trie(labels, eos))


def test_only_the_labels_first_tokens_may_come_first() -> None:
    assert sorted(grammar([1, 2], [3], [1, 4]).allowed_token_ids()) == [1, 3]


def test_the_only_path_left_is_forced() -> None:
    choice = grammar([1, 2, 3], [1, 4, 5], [6])
    assert choice.advance(1) == []
    assert sorted(choice.allowed_token_ids()) == [2, 4]
    assert not choice.is_complete
    assert choice.advance(4) == [5]
    assert choice.is_complete


def test_one_step_decides_a_label_with_its_own_first_token() -> None:
    choice = grammar([1, 2, 3], [4, 2, 3])
    assert choice.advance(4) == [2, 3]
    assert choice.is_complete


def test_a_label_that_begins_another_is_ended_by_eos() -> None:
    short = grammar([1], [1, 2])
    assert short.advance(1) == []
    assert not short.is_complete
    assert sorted(short.allowed_token_ids()) == [2, EOS]
    assert short.advance(EOS) == []
    assert short.is_complete
    long = grammar([1], [1, 2])
    long.advance(1)
    assert long.advance(2) == []
    assert long.is_complete
    with pytest.raises(InvalidRequest, match="prefix of another"):
        grammar([1], [1, 2], eos=None)


def test_two_labels_with_the_same_tokens_are_one() -> None:
    assert grammar([1, 2], [1, 2]).advance(1) == [2]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_replay_leads_where_advancing_does(tokens: list[int]) -> None:
    labels = [1, 2, 3], [1, 2, 4], [1, 5]
    replayed, advanced = grammar(*labels), grammar(*labels)
    replayed.replay(tokens)
    for token in tokens:
        assert advanced.advance(token) == []
    assert replayed.allowed_token_ids() == advanced.allowed_token_ids()


def test_replay_takes_forced_tokens_as_they_were_forced() -> None:
    choice = grammar([1, 2, 3], [4])
    choice.replay([1, 2, 3])
    assert choice.is_complete
    with pytest.raises(InvalidRequest, match="end within"):
        grammar([1, 2, 3], [4]).replay([1, 2])
    with pytest.raises(InvalidRequest, match="not what structured_outputs allows"):
        grammar([1, 2, 3], [4]).replay([5])
    with pytest.raises(InvalidRequest, match="not what structured_outputs allows"):
        grammar([4], [1, 2]).replay([4, 4])


def test_labels_are_tokenised_as_they_stand_after_the_prompt() -> None:
    tokenizer = HuggingFaceTokenizer(packaged_model_directory())
    compiler = ChoiceCompiler(tokenizer, tokenizer.eos_token_id)
    prompt = tokenizer.encode("The answer is:")
    for label in (" yes", "yes", " Überraschung", "42"):
        choice = compiler.compile((label, "#"), prompt).start()
        canonical = tokenizer.encode("The answer is:" + label)[len(prompt) :]
        assert [canonical[0], *choice.advance(canonical[0])] == canonical


def choose(llm: LLM, prompts: list[str], *labels: str, **options: object) -> list[tuple[str, list[int]]]:
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=labels), **options)  # type: ignore[arg-type]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert {result.outputs[0].finish_reason for result in results} == {"stop"}
    return [(result.outputs[0].text, result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("overlapped", [False, True])
def test_echo_chooses_the_label_it_would_have_written(overlapped: bool) -> None:
    llm = LLM("echo", async_scheduling=overlapped)
    encode = ByteTokenizer().encode
    assert choose(llm, ["dog", "cart"], "cat", "cart", "dog") == [
        ("dog", encode("dog")),
        ("cart", encode("cart")),
    ]
    assert choose(llm, ["car", "card"], "car", "card") == [
        ("car", [*encode("car"), 256]),
        ("card", encode("card")),
    ]
    llm.engine.check_integrity()


def test_forced_tokens_have_no_logprob() -> None:
    params = SamplingParams(logprobs=0, structured_outputs=StructuredOutputs(choice=("dog", "cat")))
    (result,) = LLM("echo").generate("dog", params, use_tqdm=False)
    entries = result.outputs[0].logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == ByteTokenizer().encode("dog")
    assert [entry.logprob for entry in entries[1:]] == [None, None]


def test_max_tokens_cuts_a_label_short() -> None:
    params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs(choice=("dog", "cat")))
    (result,) = LLM("echo").generate("dog", params, use_tqdm=False)
    assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("do", "length")

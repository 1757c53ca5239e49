"""`choice`: the output is one of the labels, and certain tokens are not sampled."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import InvalidRequest, SchemaTooComplex
from pagemill.engine.llm import LLM
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_output.choice import (
    MAX_CHOICE_TOKENS,
    MAX_LABEL_TOKENS,
    ChoiceCompiler,
    ChoiceGrammar,
    ChoiceTrie,
)
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer

EOS = 9


def grammar(*labels: list[int], eos: int | None = EOS) -> ChoiceGrammar:
    return ChoiceGrammar(ChoiceTrie(labels, eos))


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


def dictionaries(labels: list[list[int]]) -> dict[int, Any]:
    """The same trie, with a dictionary per node."""
    root: dict[int, Any] = {}
    for label in labels:
        node = root
        for token in label:
            node = node.setdefault(token, {})
        node[-1] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        pending += [child for token, child in node.items() if token >= 0]
        if node.pop(-1, None) is not None and node:
            node[EOS] = {}
    return root


@given(
    st.lists(st.lists(st.integers(0, 3) | st.just(EOS), min_size=1, max_size=6), min_size=1, max_size=12),
    st.data(),
)
def test_every_way_through_is_that_of_a_trie_of_dictionaries(
    labels: list[list[int]], data: st.DataObject
) -> None:
    choice, node = grammar(*labels), dictionaries(labels)
    taken: list[int] = []
    while node:
        assert set(choice.allowed_token_ids()) == set(node)
        assert len(choice.allowed_token_ids()) == len(node)
        assert not choice.is_complete
        token = data.draw(st.sampled_from(sorted(node)))
        forced = choice.advance(token)
        taken += [token, *forced]
        node = node[token]
        for expected in forced:
            assert list(node) == [expected]
            node = node[expected]
        assert len(node) != 1
        replayed = grammar(*labels)
        replayed.replay(taken)
        assert replayed.allowed_token_ids() == choice.allowed_token_ids()
    assert choice.is_complete


def test_long_labels_cost_four_bytes_a_token() -> None:
    labels = [[first, *range(1000, 1999)] for first in range(60)]
    tracemalloc.start()
    trie = ChoiceTrie(labels, EOS)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept <= trie.num_bytes <= 6 * 60_000
    assert peak <= 20 * 60_000
    choice = ChoiceGrammar(trie)
    assert choice.advance(7) == labels[7][1:]
    assert choice.is_complete


def test_labels_of_too_many_tokens_are_refused() -> None:
    compiler = ChoiceCompiler(ByteTokenizer(), EOS)
    compiler.compile(("a" * MAX_LABEL_TOKENS, "b"), [])
    with pytest.raises(SchemaTooComplex, match=f"more than {MAX_LABEL_TOKENS} tokens"):
        compiler.compile(("a" * (MAX_LABEL_TOKENS + 1), "b"), [])
    many = tuple(f"{number:0512}" for number in range(MAX_CHOICE_TOKENS // 512))
    compiler.compile(many, [])
    with pytest.raises(SchemaTooComplex, match=f"more than {MAX_CHOICE_TOKENS}"):
        compiler.compile((*many, "x"), [])


def test_what_is_kept_of_many_labels_is_bounded() -> None:
    compiler = ChoiceCompiler(ByteTokenizer(), EOS)
    tracemalloc.start()
    for number in range(100):
        text = json.dumps(number) * 15
        compiler.compile(tuple(f"{text}{label:0960}" for label in range(60)), [number])
        kept, _ = tracemalloc.get_traced_memory()
        assert kept < compiler._tries.max_bytes * 1.1
    tracemalloc.stop()
    assert compiler._tries.num_bytes <= compiler._tries.max_bytes
    assert len(compiler._tries) < 100, "some of them were dropped"


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


@pytest.mark.parametrize("label", ["<filename>", "see <|im_end|> ok", "<|im_end|>"])
def test_a_label_with_the_name_of_a_special_token_is_spelled_out(label: str) -> None:
    tokenizer = HuggingFaceTokenizer(packaged_model_directory())
    compiler = ChoiceCompiler(tokenizer, 2)
    for prompt in ([], tokenizer.encode("The answer is:")):
        choice = compiler.compile((label, "no"), prompt).start()
        first = next(
            ids
            for ids in choice.allowed_token_ids()
            if tokenizer.decode([ids]) == label[: len(tokenizer.decode([ids]))]
        )
        assert tokenizer.decode([first, *choice.advance(first)]) == label


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


def test_schemas_with_the_name_of_a_special_token_are_spelled_out() -> None:
    llm = LLM("echo")
    for schema in (
        StructuredOutputs(json={"const": "<end>"}),
        StructuredOutputs(
            json={"type": "object", "properties": {"<end>": {"const": 1}}, "required": ["<end>"]}
        ),
        StructuredOutputs(regex='"<end>"x'),
        StructuredOutputs(grammar='start: "<end>" "x"'),
    ):
        (result,) = llm.generate(
            "x", SamplingParams(max_tokens=40, structured_outputs=schema), use_tqdm=False
        )
        assert "<end>" in result.outputs[0].text


def test_a_grammar_may_name_a_special_token() -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputs(grammar='start: "a" <end> "b"'), ignore_eos=True
    )
    (result,) = LLM("echo").generate("x", params, use_tqdm=False)
    assert result.outputs[0].text.startswith("a")

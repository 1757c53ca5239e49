"""Text arrives in pieces, and the pieces are the text."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.text.detokenizer import Detokenizer, StopStrings
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EMOJI = "👩‍👩‍👧 café 日本語 🎉"


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(packaged_model_directory())


@lru_cache
def byte_tokens() -> list[int]:
    """smollm2's token of every single byte that it has one for."""
    smollm2 = tokenizer("smollm2")
    alphabet = {}
    for token in range(smollm2.vocab_size):
        text = smollm2.decode([token], skip_special_tokens=False)
        if text == REPLACEMENT or (len(text) == 1 and text.isascii()):
            alphabet.setdefault(token, text)
    assert len(alphabet) > 128
    return list(alphabet)


def deltas(name: str, prompt: list[int], chunks: list[list[int]], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer(name), prompt, skip_special_tokens=skip_special)
    return [*(detokenizer.append(chunk) for chunk in chunks), detokenizer.flush()]


def check(name: str, prompt: list[int], chunks: list[list[int]], *, skip_special: bool = True) -> None:
    tokens = [token for chunk in chunks for token in chunk]
    expected = tokenizer(name).decode(tokens, skip_special_tokens=skip_special)
    assert "".join(deltas(name, prompt, chunks, skip_special=skip_special)) == expected


chunk_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=8)


def split(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, at = [], 0
    while at < len(tokens):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(tokens[at : at + size])
        at += size
    return chunks


@pytest.mark.slow
@settings(deadline=None)
@given(st.binary(max_size=40), st.text(max_size=8), chunk_sizes)
def test_random_bytes_one_token_each(data: bytes, prompt: str, sizes: list[int]) -> None:
    check("bytes", ByteTokenizer().encode(prompt), split(list(data), sizes))


@pytest.mark.slow
@settings(deadline=None)
@given(st.data(), st.text(max_size=8), chunk_sizes, st.booleans())
def test_random_tokens(data: st.DataObject, prompt: str, sizes: list[int], skip_special: bool) -> None:
    smollm2 = tokenizer("smollm2")
    one = st.integers(0, smollm2.vocab_size - 1) | st.sampled_from(byte_tokens()) | st.integers(0, 16)
    tokens = data.draw(st.lists(one, max_size=30))
    check("smollm2", smollm2.encode(prompt), split(tokens, sizes), skip_special=skip_special)


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=8), chunk_sizes)
@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_any_text(name: str, text: str, prompt: str, sizes: list[int]) -> None:
    tokens = tokenizer(name).encode(text)
    check(name, tokenizer(name).encode(prompt), split(tokens, sizes))


@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_text_released_does_not_depend_on_the_grouping(name: str) -> None:
    tokens = tokenizer(name).encode(EMOJI)
    for cut in range(len(tokens)):
        grouped, single = (
            "".join(deltas(name, [], chunks)[:-1]) for chunks in ([tokens[:cut]], split(tokens[:cut], [1]))
        )
        assert grouped == single


@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_half_a_character_is_held_back(name: str) -> None:
    tokens = tokenizer(name).encode(EMOJI)
    assert len(tokens) > len(EMOJI), "several tokens for one character"
    pieces = deltas(name, tokenizer(name).encode("Say:"), [[token] for token in tokens])
    assert "".join(pieces) == EMOJI
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "" in pieces[:-1]
    assert pieces[-1] == ""


@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_text_cut_within_a_character_is_flushed(name: str) -> None:
    tokens = tokenizer(name).encode("ab🎉")
    pieces = deltas(name, [], [[token] for token in tokens[:-1]])
    assert "".join(pieces[:-1]) == "ab"
    assert set(pieces[-1]) == {REPLACEMENT}


def test_special_tokens_are_text_only_if_asked_for() -> None:
    smollm2 = tokenizer("smollm2")
    assert smollm2.eos_token_id is not None
    chunks = [smollm2.encode("Hi"), [smollm2.eos_token_id], smollm2.encode(" there")]
    assert "".join(deltas("smollm2", [], chunks)) == "Hi there"
    assert "".join(deltas("smollm2", [], chunks, skip_special=False)) == "Hi<|im_end|> there"


def feed(stop: StopStrings, pieces: list[str]) -> tuple[list[str], str | None]:
    released = []
    for piece in pieces:
        text, found = stop.append(piece)
        released.append(text)
        if found is not None:
            return released, found
    return [*released, stop.flush()], None


def test_stop_string_across_pieces_is_found_and_never_shown() -> None:
    stop = StopStrings(["END"], include_in_output=False)
    assert feed(stop, ["some E", "N", "D more"]) == (["some ", "", ""], "END")


def test_stop_string_is_part_of_the_text_if_asked_for() -> None:
    stop = StopStrings(["END"], include_in_output=True)
    assert feed(stop, ["some E", "N", "D more"]) == (["some ", "", "END"], "END")


def test_held_back_text_is_released_when_it_is_no_stop_string() -> None:
    stop = StopStrings(["END"], include_in_output=False)
    assert feed(stop, ["EN", "EN", "!"]) == (["", "EN", "EN!", ""], None)
    assert feed(StopStrings(["END"], include_in_output=False), ["xEN"]) == (["x", "EN"], None)


def test_earliest_stop_string_wins_then_the_longest() -> None:
    assert feed(StopStrings(["bc", "a"], include_in_output=True), ["xabc"]) == (["xa"], "a")
    assert feed(StopStrings(["ab", "abc"], include_in_output=True), ["xabc"]) == (["xabc"], "abc")


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert feed(StopStrings([], include_in_output=False), ["a", "b"]) == (["a", "b", ""], None)


@settings(deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=10),
    st.booleans(),
)
def test_released_text_is_the_text_up_to_the_stop(stops: list[str], pieces: list[str], include: bool) -> None:
    released, found = feed(StopStrings(stops, include_in_output=include), pieces)
    text, shown = "".join(pieces), "".join(released)
    if found is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
        return
    assert found in stops
    # The first piece that completes a stop string ends the text, at the leftmost one it holds then.
    seen = next(
        "".join(pieces[: n + 1])
        for n in range(len(pieces))
        if any(stop in "".join(pieces[: n + 1]) for stop in stops)
    )
    at = min(seen.find(stop) for stop in stops if stop in seen)
    assert seen.startswith(found, at)
    assert shown == seen[: at + len(found) if include else at]

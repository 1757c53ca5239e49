"""Text arrives in pieces, and the pieces add up to the text."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.text.detokenizer import Detokenizer, StopStrings
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.engine.text import byte_fallback

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NAMES = ["bytes", "smollm2", *byte_fallback.KINDS]
EMOJI = "👩‍👩‍👧 café 日本語 🎉"


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    if name in byte_fallback.KINDS:
        return byte_fallback.byte_fallback(name)
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(packaged_model_directory())


@lru_cache
def byte_tokens() -> list[int]:
    """smollm2's token for every single byte that has one."""
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
    whole, before = (
        tokenizer(name).decode(ids, skip_special_tokens=skip_special) for ids in (prompt + tokens, prompt)
    )
    expected = whole[len(before) :]
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
@pytest.mark.parametrize("name", NAMES)
def test_any_text(name: str, text: str, prompt: str, sizes: list[int]) -> None:
    tokens = tokenizer(name).encode(text)
    check(name, tokenizer(name).encode(prompt), split(tokens, sizes))


@pytest.mark.parametrize("name", NAMES)
def test_text_released_does_not_depend_on_the_grouping(name: str) -> None:
    tokens = tokenizer(name).encode(EMOJI)
    for cut in range(len(tokens)):
        grouped, single = (
            "".join(deltas(name, [], chunks)[:-1]) for chunks in ([tokens[:cut]], split(tokens[:cut], [1]))
        )
        assert grouped == single


@pytest.mark.parametrize("name", NAMES)
def test_half_a_character_is_held_back(name: str) -> None:
    tokens = tokenizer(name).encode(EMOJI)
    assert len(tokens) > len(EMOJI), "several tokens for one character"
    pieces = deltas(name, tokenizer(name).encode("Say:"), [[token] for token in tokens])
    assert "".join(pieces).lstrip(" ") == EMOJI  # some tokenizers begin a text with a space
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "" in pieces[:-1]
    assert pieces[-1] == ""


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", byte_fallback.KINDS)
def test_every_cut_of_a_text_in_byte_tokens(name: str) -> None:
    text = "a 🤗🤗 yes é 日本語 b👩‍👩‍👧"
    lengths = [len(tokenizer(name).encode(text[:end])) for end in range(len(text) + 1)]
    tokens = tokenizer(name).encode(text)
    assert tokenizer(name).decode(tokens) == text
    for cut in range(len(tokens)):
        pieces = deltas(name, tokens[:cut], split(tokens[cut:], [1]))
        num_before = max((end for end, length in enumerate(lengths) if length <= cut), default=0)
        assert "".join(pieces) == text[num_before:], cut
        assert not any(REPLACEMENT in piece for piece in pieces)


def lossy(tokens: list[int]) -> str:
    """Return the text of byte tokens and of `a`, with one replacement character per invalid byte."""
    text, at = "", 0
    data = bytes(token - byte_fallback.FIRST_BYTE for token in tokens)
    while at < len(data):
        for size in range(1, 5):
            try:
                text, at = text + data[at : at + size].decode(), at + size
                break
            except UnicodeDecodeError:
                continue
        else:
            text, at = text + REPLACEMENT, at + 1
    return text


characters = st.sampled_from([*(c.encode() for c in "aé日🤗 "), b"\x80", b"\xf0", b"\xe6\x97"])
byte_runs = st.lists(characters | st.binary(max_size=2), max_size=8).map(b"".join)


@settings(deadline=None)
@given(st.lists(byte_runs, max_size=3), chunk_sizes, st.data())
@pytest.mark.parametrize("name", byte_fallback.KINDS)
def test_random_byte_tokens_and_every_cut(
    name: str, runs: list[bytes], sizes: list[int], data: st.DataObject
) -> None:
    backend = tokenizer(name)
    (word,) = [token for token in range(backend.vocab_size) if backend.piece(token) == "b"]
    tokens = [word]
    for run in runs:
        tokens += [*byte_fallback.byte_tokens(run), word]
    expected = "b" + "".join(lossy(byte_fallback.byte_tokens(run)) + "b" for run in runs)
    decoded = backend.decode(tokens)
    if REPLACEMENT not in decoded:
        assert decoded == expected
    cut = data.draw(st.integers(1, len(tokens)))
    pieces = "".join(deltas(name, tokens[:cut], split(tokens[cut:], sizes)))
    assert expected.endswith(pieces)
    # The text before the output belongs to the prompt, up to a character that the output completes.
    shown = len(expected) - len(pieces)
    prompt = "".join(deltas(name, [], [tokens[:cut]]))
    assert expected[:shown].rstrip(REPLACEMENT) == prompt.rstrip(REPLACEMENT)
    assert "".join(deltas(name, [], split(tokens, sizes))) == expected


class Counted:
    """Counts the tokens that are decoded."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner, self.decoded = inner, 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


REPETITIONS = {
    "bytes": [b"\x80", b"\xff", REPLACEMENT.encode(), b"\xe6\x97"],
    **{kind: [b"\x80", REPLACEMENT.encode(), "🤗".encode(), b"\xe6\x97"] for kind in byte_fallback.KINDS},
}


@pytest.mark.parametrize(
    ("name", "unit"), [(name, unit) for name, units in REPETITIONS.items() for unit in units]
)
def test_a_run_of_replacement_characters_costs_a_constant_per_token(name: str, unit: bytes) -> None:
    tokens = list(unit * 200) if name == "bytes" else byte_fallback.byte_tokens(unit * 200)
    counted = Counted(tokenizer(name))
    detokenizer = Detokenizer(counted, [], skip_special_tokens=True)  # type: ignore[arg-type]
    pieces = [detokenizer.append([token]) for token in tokens]
    longest = max(len(piece) for piece in pieces)
    assert longest <= 3
    assert counted.decoded < 64 * len(tokens)
    if name == "bytes":
        assert "".join(pieces) + detokenizer.flush() == tokenizer(name).decode(tokens)


@pytest.mark.parametrize("name", ["smollm2", *byte_fallback.KINDS])
def test_a_run_of_hidden_tokens_costs_a_constant_per_token(name: str) -> None:
    counted = Counted(tokenizer(name))
    detokenizer = Detokenizer(counted, [], skip_special_tokens=True)  # type: ignore[arg-type]
    assert detokenizer.append([2] * 500) + detokenizer.append(tokenizer(name).encode("a")) == "a"
    assert counted.decoded < 64 * 500


@pytest.mark.parametrize("name", NAMES)
def test_the_output_completes_the_prompts_last_character(name: str) -> None:
    tokens = tokenizer(name).encode("a🤗 yes")
    text = "🤗 yes"
    for cut in range(1, len(tokens)):
        shown = "".join(deltas(name, tokens[:cut], split(tokens[cut:], [1])))
        if REPLACEMENT in tokenizer(name).decode(tokens[:cut]):
            assert shown == text


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
    # The first piece that completes a stop string ends the text, at the leftmost one it contains then.
    seen = next(
        "".join(pieces[: n + 1])
        for n in range(len(pieces))
        if any(stop in "".join(pieces[: n + 1]) for stop in stops)
    )
    at = min(seen.find(stop) for stop in stops if stop in seen)
    assert seen.startswith(found, at)
    assert shown == seen[: at + len(found) if include else at]

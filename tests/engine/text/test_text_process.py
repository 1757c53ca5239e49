"""Templates and tokenizers of a malicious publisher: a typed error within limits, and the next text is processed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pagemill.engine.errors import EngineError, InvalidRequest, ModelLoadError
from pagemill.engine.limited_process import Refused
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.text.text_encoder import TextEncoder
from pagemill.engine.text.text_process import TextProcess
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer

CHAT = [{"role": "user", "content": "Hi"}]
BYTES = json.loads(ByteTokenizer().to_json())
AMPLIFIER = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 1000}] * 5,
}
BACKTRACKING = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "(q+)+$"}, "behavior": "Isolated", "invert": False},
        BYTES["pre_tokenizer"],
    ],
}
BOMB = "q" * 30 + "!"


@pytest.fixture(scope="module")
def process() -> Iterator[TextProcess]:
    process = TextProcess(call_s=0.3, memory_mib=128)
    yield process
    process.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9**(9**9) }}",
        "{% set n = messages|length + 8 %}{{ (n**(n**n))|string|length }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='xxxx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'x' * (10**10) }}", "{{ 'x'.ljust(10**10) }}", "{{ '%10000000000d'|format(1) }}",
        "{{ 'x'|center(10**10) }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)  # fmt: skip
def test_a_template_without_end_is_ended(process: TextProcess, template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"more than 0\.3 s of CPU time or 128 MiB"):
        process.render(template, {"messages": CHAT})
    assert process.render("{{ messages[0].content }}", {"messages": CHAT}) == "Hi"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"), ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"), ("{{ 1|nothing }}", "No filter"),
        ("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "renders more than"),
        ("{% set n = namespace(__init__=1) %}", "__init__"), ("{{ raise_exception('no') }}", "^no$"),
    ],
)  # fmt: skip
def test_a_template_that_may_not_is_refused(process: TextProcess, template: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        process.render(template, {"messages": CHAT})


def test_what_is_no_json_is_refused(process: TextProcess) -> None:
    with pytest.raises(InvalidRequest, match="JSON values"):
        process.render("{{ messages }}", {"messages": [object()]})


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m.content | trim }}\n{% endfor %}{{ bos_token }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}\n    {% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
        "{{ tools is defined }} {{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ x }}",
        "{{ strftime_now('%Y') }} {{ dict(a=1) }} {{ messages[-1].reasoning }}",
        "{{ messages[::-1][0].content.split('ö') }} {{ messages | map(attribute='role') | list }} é\u2028",
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    for file in packaged_model_directory().iterdir():
        if "tokenizer" in file.name or file.name == "special_tokens_map.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": " Wörter  "},
        {"role": "assistant", "content": "a", "reasoning": "why", "name": None},
    ]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, x=[1]
    )
    assert HuggingFaceTokenizer(tmp_path).render_chat(chat, (), {"x": [1]}) == expected
    # Some versions of transformers have only the name in the message.
    names = "{{ messages[-1].thinking }} {{ messages[-1].reasoning_content }}"
    (tmp_path / "chat_template.jinja").write_text(names)
    assert HuggingFaceTokenizer(tmp_path).render_chat(chat, (), {}) == "why why"


def test_names_that_the_template_depends_on_are_not_variables() -> None:
    tokenizer = HuggingFaceTokenizer(packaged_model_directory())
    for name in ("messages", "tools", "chat_template", "tokenize"):
        with pytest.raises(InvalidRequest, match=f"chat_template_kwargs: {name} can't be set"):
            tokenizer.render_chat(CHAT, (), {name: 1})


def write(directory: Path, **parts: Any) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(BYTES | parts))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [{"normalizer": AMPLIFIER}, {"pre_tokenizer": BACKTRACKING}], ids=["grows", "regex"]
)
def test_a_text_that_a_tokenizer_does_not_end_is_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path, **parts))
    assert tokenizer.is_limited
    assert tokenizer.encode("abc") == list(b"abc")
    assert tokenizer._process is not None
    tokenizer._process._call_s, tokenizer._process._memory_mib = 1.0, 128
    tokenizer._process.close()
    with pytest.raises(InvalidRequest, match="the tokenizer"):
        tokenizer.encode(BOMB)
    assert tokenizer.encode("abc") == list(b"abc")
    encoder = TextEncoder(tokenizer.to_json() or "", gives_types=False, is_limited=True)
    assert [text.token_ids for text in encoder.encode(["abc", ("d", "e")])] == [list(b"abc"), list(b"de")]
    assert encoder.encode(["abc"], shorten_to=2)[0].token_ids == list(b"ab")
    assert encoder.num_leading_tokens("abc") == 3


def test_a_tokenizer_that_fails_on_a_sample_is_no_model(tmp_path: Path) -> None:
    hostile = json.loads(json.dumps(BACKTRACKING).replace("(q+)+", "(a+)+"))
    with pytest.raises(ModelLoadError, match=r"can't load tokenizer\.json: .*hostile"):
        HuggingFaceTokenizer(write(tmp_path, pre_tokenizer=hostile))


def test_a_decoder_without_bounds_is_no_model(tmp_path: Path) -> None:
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    with pytest.raises(ModelLoadError, match="decoder can make a text of any length"):
        HuggingFaceTokenizer(write(tmp_path, decoder={"type": "Sequence", "decoders": [grows] * 5}))


class PanicException(BaseException):
    """The form of Rust's panics: not an Exception."""


def test_a_panic_is_an_error_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path))
    assert not tokenizer.is_limited

    class Panicking:
        def encode(self, *_: Any, **__: Any) -> None:
            raise PanicException("retry-limit-in-match over")

        decode = encode_batch = encode

    monkeypatch.setattr(tokenizer, "_tokenizer", Panicking())
    monkeypatch.setattr(tokenizer, "_backend", Panicking())
    with pytest.raises(InvalidRequest, match="the tokenizer rejects the text: retry-limit"):
        tokenizer.encode("a")
    with pytest.raises(EngineError, match="can't decode a token: retry-limit"):
        tokenizer.decode([1])
    encoder = TextEncoder(json.dumps(BYTES), gives_types=False)
    monkeypatch.setattr(encoder, "_tokenizer", Panicking())
    with pytest.raises(InvalidRequest, match="the tokenizer rejects the text: retry-limit"):
        encoder.encode(["a"])

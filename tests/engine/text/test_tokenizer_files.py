"""Tokenizers as publishers ship them: converted, and the same ids as their own library returns."""

from __future__ import annotations

import json
import random
import unicodedata
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.text.byte_level import byte_characters
from pagemill.engine.text.sentencepiece_model import build_tokenizer, read_sentencepiece
from pagemill.engine.text.tiktoken_vocabulary import QWEN_PATTERN, read_ranks
from pagemill.engine.text.tokenizer import HuggingFaceTokenizer, load_tokenizer

TEXTS = [
    "Hello world", "  leading", " one", "\n\nnew\tlines \n ", "中文字符\uff0c测试。", "日本語 한국어", "🎉🤷‍♀️ emoji",
    "café naïve",
    "cafe\u0301", "1234567 3.14 0x1F", "a" * 50, "aaaa bbbb", "\u2581under", "   ", "\x00\x07", "x\r\ny",
    "def f(x):\n    return x + 1\n", "مرحبا بالعالم", "ﬁ ligature ①", "\U0001f1e9\U0001f1ea\u200d\u2764\ufe0f",
    "'s 'LL don't",
]  # fmt: skip
TEXTS += ["".join(random.Random(seed).choices("ab c\n1é中🎉'A ", k=30)) for seed in range(200)]


def shipped(package: str, file: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package}, which ships {file}, is not installed")
    return Path(spec.submodule_search_locations[0]) / file


def train(directory: Path, **options: Any) -> Path:
    corpus = directory / "corpus.txt"
    lines = [text.replace("\n", " ").replace("\x00", "") for text in TEXTS]
    corpus.write_text("\n".join(lines * 3), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(directory / "tokenizer"), hard_vocab_limit=False, minloglevel=9,
        **({"vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False} | options),
    )  # fmt: skip
    return directory / "tokenizer.model"


class TestSentencePiece:
    @pytest.mark.parametrize(
        "options",
        [
            {"model_type": "bpe"},
            {"model_type": "bpe", "add_dummy_prefix": False},
            {"model_type": "bpe", "byte_fallback": False},
            {"model_type": "bpe", "split_digits": True, "allow_whitespace_only_pieces": True},
            {"model_type": "unigram"},
            {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
            {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        ],
        ids=str,
    )
    def test_ids_and_texts_are_sentencepieces(self, options: dict[str, Any], tmp_path: Path) -> None:
        self.compare(train(tmp_path, **options))

    @pytest.mark.parametrize(
        "name",
        [
            "tokenizer.model.v1",
            pytest.param("mistral_instruct_tokenizer_240216.model.v2", marks=pytest.mark.slow),
        ],
    )
    def test_mistrals_own(self, name: str) -> None:
        self.compare(shipped("mistral_common", f"data/{name}"))

    def compare(self, file: Path) -> None:
        reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
        tokenizer = build_tokenizer(read_sentencepiece(file), prefixes_every_part=True)
        model = read_sentencepiece(file)
        for text in TEXTS:
            if model.charsmap and "\r\n" in text:
                continue  # tokenizers normalizes the two as one character
            ids = reference.encode(text)
            assert tokenizer.encode(text).ids == ids, repr(text)
            if reference.unk_id() not in ids:
                assert tokenizer.decode(ids) == reference.decode(ids), repr(text)

    def test_control_and_user_defined_pieces(self, tmp_path: Path) -> None:
        file = train(tmp_path, model_type="bpe", user_defined_symbols=["<eoh>"], control_symbols=["<ctl>"])
        reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
        tokenizer = build_tokenizer(read_sentencepiece(file), prefixes_every_part=False)
        assert tokenizer.encode("a<eoh>b c").ids == reference.encode("a<eoh>b c")
        control = reference.piece_to_id("<ctl>")
        assert tokenizer.encode("<ctl>").ids == [control]
        assert tokenizer.decode([control]) == ""

    @pytest.mark.parametrize(
        ("kind", "begins"),
        [("LlamaTokenizer", True), ("BaichuanTokenizer", False), ("InternLMTokenizer", True), (None, True)],
    )
    def test_directory_of_a_publisher(self, kind: str | None, begins: bool, tmp_path: Path) -> None:
        """As on the Hub: the model, and a tokenizer_config.json that names the publisher's own code."""
        file = train(tmp_path, model_type="bpe")
        config: dict[str, Any] = (
            {"auto_map": {"AutoTokenizer": [f"tokenization.{kind}", None]}} if kind else {}
        )
        config |= {"tokenizer_class": kind, "add_bos_token": False} if kind == "BaichuanTokenizer" else {}
        if kind:
            config |= {"tokenizer_class": kind, "bos_token": {"__type": "AddedToken", "content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "tokenization").with_suffix(".py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
        tokenizer = HuggingFaceTokenizer(tmp_path)
        for text in TEXTS:
            assert tokenizer.encode(text) == [1] * begins + reference.encode(text)
            assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))
        assert tokenizer.eos_token_id == 2
        assert tokenizer.vocab_size == reference.vocab_size()
        assert not (tmp_path / "ran").exists()

    def test_what_follows_a_special_token(self, tmp_path: Path) -> None:
        """`legacy`: as after a space; otherwise unchanged."""
        file = train(tmp_path, model_type="bpe")
        reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        for legacy in (True, False):
            (tmp_path / "tokenizer_config.json").write_text(
                json.dumps({"legacy": legacy, "add_bos_token": False})
            )
            ids = HuggingFaceTokenizer(tmp_path).encode("<s>b c")
            assert (ids == [1, *reference.encode("b c")]) == legacy

    def test_added_tokens_follow_the_vocabulary(self, tmp_path: Path) -> None:
        reference = sentencepiece.SentencePieceProcessor(model_file=str(train(tmp_path, model_type="bpe")))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "LlamaTokenizer", "pad_token": "<pad>"}'
        )
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": reference.vocab_size()}))
        tokenizer = HuggingFaceTokenizer(tmp_path)
        assert tokenizer.encode("a<pad>", add_special_tokens=False)[-1] == reference.vocab_size()

    @pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff\xff\x0f"])
    def test_damaged(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"can't load the tokenizer in .*tokenizer\.model: "):
            HuggingFaceTokenizer(tmp_path)


def write_ranks(directory: Path) -> Path:
    """A vocabulary as tiktoken's trainer would write it: bytes, then merges in their order."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    of = {character: byte for byte, character in enumerate(byte_characters())}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    lines = [f"{b64encode(bytes(of[c] for c in token)).decode()} {number}" for token, number in by_id]
    (directory / "qwen.tiktoken").write_text("\n".join(lines) + "\n")
    return directory / "qwen.tiktoken"


class TestTiktoken:
    def compare(self, directory: Path) -> None:
        config = {
            "tokenizer_class": "QWenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        tokens = read_ranks(directory / "qwen.tiktoken")
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
        reference = tiktoken.Encoding(
            "qwen", pat_str=QWEN_PATTERN, mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={name: len(tokens) + number for number, name in enumerate(special)},
        )  # fmt: skip
        tokenizer = HuggingFaceTokenizer(directory)
        for text in [*TEXTS, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|extra_204|>"]:
            normal = unicodedata.normalize("NFC", text)
            ids = reference.encode(normal, allowed_special="all")
            assert tokenizer.encode(text) == ids, repr(text)
            assert tokenizer.decode(ids, skip_special_tokens=False) == normal
        assert tokenizer.eos_token_id == len(tokens)
        assert tokenizer.vocab_size == len(tokens) + len(special)

    def test_ids_and_texts_are_tiktokens(self, tmp_path: Path) -> None:
        write_ranks(tmp_path)
        self.compare(tmp_path)

    @pytest.mark.slow
    def test_qwens_own(self, tmp_path: Path) -> None:
        file = shipped("dashscope", "resources/qwen.tiktoken")
        (tmp_path / "qwen.tiktoken").write_bytes(file.read_bytes())
        self.compare(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"abc\n", b"!!!! 0\n", b"IQ== 0\nIg== 2\n"])
    def test_damaged(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "qwen.tiktoken").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"can't load the tokenizer in .*qwen\.tiktoken: "):
            HuggingFaceTokenizer(tmp_path)


class TestOthers:
    def byte_level(self, directory: Path, kind: str) -> FastTokenizer:
        """vocab.json and merges.txt, as GPT-2 and OPT ship them; returns a tokenizer that reads them the same way."""
        tokenizer = FastTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        special = ["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>"]
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=special)
        tokenizer.train_from_iterator(TEXTS * 3, trainer)
        tokenizer.model.save(str(directory))
        (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        return tokenizer

    def test_vocabulary_and_merges(self, tmp_path: Path) -> None:
        reference = self.byte_level(tmp_path, "GPT2Tokenizer")
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        tokenizer = HuggingFaceTokenizer(tmp_path)
        for text in TEXTS:
            assert tokenizer.encode(text) == reference.encode(text).ids

    @pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend"])
    def test_a_file_keeps_its_rules_under_another_model_type(self, kind: str, tmp_path: Path) -> None:
        reference = self.byte_level(tmp_path, kind)
        reference.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
        tokenizer = HuggingFaceTokenizer(tmp_path)
        for text in TEXTS:
            assert tokenizer.encode(text) == reference.encode(text).ids

    @pytest.mark.parametrize("missing", ["merges.txt", "vocab.json"])
    def test_half_of_it(self, missing: str, tmp_path: Path) -> None:
        self.byte_level(tmp_path, "GPT2Tokenizer")
        (tmp_path / missing).unlink()
        with pytest.raises(ModelLoadError, match=f"no {missing}; download the tokenizer's files again"):
            load_tokenizer(tmp_path)

    def test_configuration_alone(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
            load_tokenizer(tmp_path)

    def test_code_that_is_not_known_is_refused_by_name(self, tmp_path: Path) -> None:
        self.byte_level(tmp_path, "StrangeTokenizer")
        config = {
            "tokenizer_class": "StrangeTokenizer",
            "auto_map": {"AutoTokenizer": ["strange.StrangeTokenizer", None]},
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "strange").with_suffix(".py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        with pytest.raises(
            ModelLoadError, match=r"StrangeTokenizer is code .*convert it to a tokenizer\.json"
        ):
            HuggingFaceTokenizer(tmp_path)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"', "\x00"])
    def test_damaged(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelLoadError, match=r"can't load the tokenizer .*download its files again"):
            HuggingFaceTokenizer(tmp_path)

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        assert load_tokenizer(tmp_path) is None

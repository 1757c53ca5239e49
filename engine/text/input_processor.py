"""Converts a caller's input for the engine: tokenizes, validates, resolves defaults. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn

from pagemill.common.chat.syntax import ChatSyntax
from pagemill.common.json_values import is_unicode
from pagemill.engine.byte_cache import ByteCache, text_bytes
from pagemill.engine.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagemill.engine.media import MediaItem
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Generate, Score
from pagemill.engine.text.chat import ChatFormat, ChatOptions
from pagemill.engine.text.pictures import (
    ImageReader,
    as_shown,
    expanded,
    image_parts,
    place,
    with_pictures,
)
from pagemill.engine.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from pagemill.engine.text.tokenizer import Message, Tokenizer

MAX_BAD_WORD_TOKENS = 32_768
"""Limit on a request's bad words in total: each is compared with every row's last tokens in every step."""
_BAD_WORDS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class InputLimits:
    """The limits of the model and the pool."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    """Token slots in the whole KV pool."""
    max_num_seqs: int
    eos_token_ids: tuple[int, ...] = ()


class InputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: InputLimits,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        images: ImageReader | str = "the model does not read images",
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        """The parsers are those of `EngineConfig`; `images` prepares pictures, or is the reason for rejecting them."""
        self.defaults = defaults
        self._parsers = tool_call_parser, reasoning_parser
        self._images = images
        self._tokenizer = tokenizer
        self._limits = limits
        self._bad_word_ids: ByteCache[tuple[str, ...], tuple[tuple[int, ...], ...]] = ByteCache(
            _BAD_WORDS_BYTES, lambda words, ids: text_bytes(words) + sum(100 + 40 * len(one) for one in ids)
        )

    def __reduce__(self) -> Any:
        """Omit cached state of requests."""
        tools, reasoning = self._parsers
        make = partial(
            InputProcessor,
            tool_call_parser=tools,
            reasoning_parser=reasoning,
            images=self._images,
            defaults=self.defaults,
        )
        return make, (self._tokenizer, self._limits)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; valid ids are below it."""
        return self._limits.vocab_size

    labels: tuple[str, ...] = ()
    """Token types that the model distinguishes: here none."""

    def can_resume(self, token_ids: list[int]) -> bool:
        """Return whether an output that `process` gave this prompt can be continued."""
        return True

    def read_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with prepared pictures in place of images' bytes, for the other methods.

        Raises:
            InvalidImage: one of them can't be decoded, or exceeds a limit.
            UnsupportedFeature: the model does not support images, or the package that prepares them is missing.
            PromptTooLong: their placeholders alone are longer than max_model_len.
        """
        images = [part["image"] for part in image_parts(messages)]
        if not images:
            return messages
        if isinstance(self._images, str):
            raise UnsupportedFeature(self._images)
        pictures = []
        num_tokens = 0
        for picture in self._images.read(images):
            pictures.append(picture)
            num_tokens += picture.num_placeholders
            if num_tokens >= self._limits.max_model_len:
                raise PromptTooLong(
                    f"image {len(pictures)} brings the prompt to {num_tokens} image tokens, the model takes "
                    f"{self._limits.max_model_len} tokens (max_model_len)"
                )
        return with_pictures(messages, pictures)

    def media_of(self, token_ids: Sequence[int], messages: Sequence[Message] | None) -> tuple[MediaItem, ...]:
        """Return the media of a prompt that was rendered from messages with pictures.

        Raises:
            InvalidRequest: the tokens do not match the placeholders of the pictures.
        """
        pictures = [part["image"] for part in image_parts(messages or ())]
        if not pictures:
            return ()
        assert not isinstance(self._images, str), "read_images made the pictures"
        return place(token_ids, pictures, self._images.markers.placeholder_id)

    def process(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        params: SamplingParams,
    ) -> tuple[list[int], SamplingParams]:
        """Tokenize and check one request; exactly one of the three inputs is given.

        Returns:
            The prompt's token ids, and the parameters with `max_tokens` resolved: never None, never past
            max_model_len, and by default never more than the KV pool holds.

        Raises:
            InvalidRequest: see the subclasses for the remedy.
        """
        if params.thinking_token_budget is not None:
            raise UnsupportedFeature("thinking_token_budget is a chat's, which a worker runs; use max_tokens")
        token_ids = self._tokenise(prompt, messages, prompt_token_ids)
        return self._checked(token_ids, params)

    def process_chat(
        self, messages: Sequence[Message], options: ChatOptions, params: SamplingParams
    ) -> tuple[list[int], SamplingParams, Generate, ChatSyntax]:
        """Like `process`, for a chat with tools, or with separate reasoning.

        Returns:
            Also the task for `add_request`, and the parser of the output's text.
        """
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send prompt_token_ids")
        chat = self._chat_format.prepare(as_shown(messages), options, params)
        token_ids, params = self._checked(self._encode_chat(chat.prompt, messages), chat.params)
        return token_ids, params, chat.task, chat.syntax

    @property
    def parses_every_chat(self) -> bool:
        """True if a chat's output must be parsed even if the job does not request it."""
        return self._tokenizer is not None and self._chat_format.parses_every_chat

    @cached_property
    def _chat_format(self) -> ChatFormat:
        assert self._tokenizer is not None
        return ChatFormat(self._tokenizer, *self._parsers)

    def _checked(self, token_ids: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        self._check_params(params)
        params = self._with_special_stops(params)
        token_ids = self._truncated(token_ids, params)
        self._check_prompt(token_ids)
        self._check_choice(params)
        return token_ids, replace(params, max_tokens=self._resolve_max_tokens(len(token_ids), params))

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """Add the ids of stop strings that are special tokens, which an output's text omits."""
        tokenizer = self._tokenizer
        if tokenizer is None or not params.stop or not params.skip_special_tokens:
            return params
        found = []
        for text in params.stop:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1 and not tokenizer.decode(ids) and tokenizer.piece(ids[0]) == text:
                found += ids
        if not found:
            return params
        return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *found))))

    def process_score(
        self,
        continuations: Sequence[str | Sequence[int]] = (),
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        params: SamplingParams,
    ) -> tuple[list[int], SamplingParams, Score]:
        """Tokenize and check the text to score: continuations of the prompt, or the prompt itself.

        A continuation is tokenized separately, as text without special tokens: no token spans the end of the
        prompt. The first token of a scored prompt is the context, because it does not have a prediction.

        Args:
            params: `logprobs` alternatives per position; other fields are not used.

        Returns:
            The context's token ids, the parameters, and the task, for `add_request`.

        Raises:
            InvalidRequest: see the subclasses.
        """
        token_ids = self._truncated(self._tokenise(prompt, messages, prompt_token_ids), params)
        self.check_token_ids("prompt_token_ids", token_ids)
        targets = [self._encode(text) if isinstance(text, str) else list(text) for text in continuations]
        if not targets:
            token_ids, targets = token_ids[:1], [token_ids[1:]]
        for target in targets:
            self.check_token_ids("continuations", target)
        if not token_ids or not all(targets):
            raise InvalidRequest("there is nothing to score: a prompt needs two tokens, a continuation one")
        longest = max(map(len, targets))
        if len(token_ids) + longest > self._limits.max_model_len:
            raise PromptTooLong(
                f"the prompt and the longest continuation have {len(token_ids) + longest} tokens, the model takes "
                f"{self._limits.max_model_len} (max_model_len)"
            )
        params = replace(params, n=len(targets), max_tokens=longest, logprobs=params.logprobs or 0)
        return token_ids, params, Score(tuple(map(tuple, targets)))

    def process_pool(self, _: object) -> NoReturn:
        """Raise UnsupportedFeature: the model does not compute vectors or labels."""
        raise UnsupportedFeature(
            "the model generates text and does not accept embed, classify or rerank jobs: submit with task generate "
            "or score, or start a worker with a model that gives vectors or labels"
        )

    def bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of words that must not be generated, each with and without a space before
        it.

        A word has different tokens at the start of a text or after a bracket than after a space. Only
        these two forms are forbidden: individual letters can still spell it.

        Raises:
            UnsupportedFeature: there is no tokenizer.
            InvalidRequest: they have more than `MAX_BAD_WORD_TOKENS` tokens.
        """
        if not words:
            return ()
        token_ids = self._bad_word_ids.get(words)
        if token_ids is None:
            token_ids = self._encode_bad_words(words)
            self._bad_word_ids.put(words, token_ids)
        return token_ids

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if self._tokenizer is None:
            raise UnsupportedFeature("bad_words need a tokenizer, and this model has none")
        sequences: dict[tuple[int, ...], None] = {}
        num_tokens = 0
        for word in words:
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                token_ids = tuple(self._encode(text))
                # A tokenizer can have tokens that the model lacks: they never occur in an output.
                if token_ids and max(token_ids) < self._limits.vocab_size:
                    sequences[token_ids] = None
                num_tokens += len(token_ids)
            if num_tokens > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"bad_words have more than {MAX_BAD_WORD_TOKENS} tokens")
        return tuple(sequences)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send token ids")
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeError as error:
            raise InvalidRequest("the text is not valid Unicode") from error

    def _encode_chat(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a rendered chat. Raises InvalidRequest."""
        pictures = [part["image"] for part in image_parts(messages)]
        if not pictures:
            return self._encode(text)  # the template adds the special tokens itself
        assert not isinstance(self._images, str), "read_images made the pictures"
        markers = self._images.markers
        # Like transformers' processors, add the special tokens that a template does not write.
        has_bos = bool(markers.bos) and text.startswith(markers.bos)
        return self._encode(expanded(text, pictures, markers), add_special_tokens=not has_bos)

    def _tokenise(
        self,
        prompt: str | None,
        messages: Sequence[Message] | None,
        prompt_token_ids: Sequence[int] | None,
    ) -> list[int]:
        if sum(value is not None for value in (prompt, messages, prompt_token_ids)) != 1:
            raise InvalidRequest("exactly one of prompt, messages and prompt_token_ids is required")
        if prompt_token_ids is not None:
            return list(prompt_token_ids)
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send prompt_token_ids")
        try:
            if messages is not None:
                return self._encode_chat(self._tokenizer.render_chat(as_shown(messages), (), {}), messages)
            assert prompt is not None
            return self._tokenizer.encode(prompt)
        except UnicodeError as error:
            raise InvalidRequest("the text is not valid Unicode") from error

    @staticmethod
    def _truncated(token_ids: list[int], params: SamplingParams) -> list[int]:
        most = params.truncate_prompt_tokens
        return token_ids if most is None else token_ids[-most:]

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens")
        self.check_token_ids("prompt_token_ids", token_ids)
        if len(token_ids) >= self._limits.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens; with room for one output token the model takes "
                f"{self._limits.max_model_len - 1} (max_model_len {self._limits.max_model_len})"
            )

    def _check_params(self, params: SamplingParams) -> None:
        if params.num_sequences > self._limits.max_num_seqs:
            raise InvalidRequest(
                f"n, best_of or beam_width is {params.num_sequences}; this engine runs "
                f"{self._limits.max_num_seqs} sequences at once"
            )
        choices = () if params.structured_outputs is None else params.structured_outputs.choice or ()
        if not all(map(is_unicode, (*params.stop, *choices))):
            raise InvalidRequest("a stop string or choice is not valid Unicode")
        self.check_token_ids("stop_token_ids", params.stop_token_ids)
        self.check_token_ids("logit_bias", list(params.logit_bias))
        self.check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        if self._tokenizer is None:
            if params.stop:
                raise UnsupportedFeature("stop strings need a tokenizer, and this model has none")
            if params.structured_outputs is not None:
                raise UnsupportedFeature("structured_outputs need a tokenizer, and this model has none")

    def _check_choice(self, params: SamplingParams) -> None:
        """Reject parameters that forbid every first token; a later dead end fails the request when it occurs."""
        barred = {ids[0] for ids in self.bad_word_ids(params.bad_words) if len(ids) == 1}
        if params.min_tokens and params.structured_outputs is None:
            barred.update(self._limits.eos_token_ids, params.stop_token_ids)
        if params.allowed_token_ids is not None and barred.issuperset(params.allowed_token_ids):
            raise InvalidRequest("allowed_token_ids: bad_words or min_tokens bar every one of them")

    def check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequest for ids outside the vocabulary; `name` is for the message."""
        # On a GPU, one id outside the embedding would end the process for every other request.
        if any(type(token) is not int for token in token_ids):
            raise InvalidRequest(f"{name}: must be integers")
        size = self._limits.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            first = next(token for token in token_ids if not 0 <= token < size)
            raise InvalidRequest(
                f"{name}: token id {first} is not in the model's vocabulary of {size} tokens"
            )

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        context_left = self._limits.max_model_len - num_prompt_tokens
        if params.max_tokens is not None:
            return min(params.max_tokens, context_left)
        # The last token is never written to the cache, hence one slot more than the pool has. If not even one
        # fits, the scheduler rejects the request.
        pool_left = self._limits.pool_tokens // params.num_sequences - num_prompt_tokens + 1
        most = self.defaults.max_tokens
        return max(1, params.min_tokens, min(context_left, pool_left, context_left if most is None else most))

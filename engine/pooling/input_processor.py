"""Tokenizes and validates texts for a model for vectors or scores. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pagemill.engine.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagemill.engine.pooling.folder import ClassifierFolder, EmbedderFolder, PoolingFolder
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import Pool, PoolingKind
from pagemill.engine.text.sampling_defaults import NO_DEFAULTS
from pagemill.engine.text.text_encoder import EncodedText, TextEncoder
from pagemill.engine.text.text_process import Text

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
"""Sampling parameters of a request that does not sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInput:
    """A caller's texts, and the requested task."""

    kind: PoolingKind
    texts: Sequence[str | Sequence[int]]
    """With a `query`, each is the second text of a pair."""
    query: str | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    truncate: bool = False
    """Cut texts that are too long, instead of rejecting them."""


class PoolingInputProcessor:
    def __init__(
        self, encoder: TextEncoder | None, folder: PoolingFolder, limits: PoolingLimits, width: int
    ) -> None:
        """`width`: the number of values in a text's row."""
        self._encoder, self._folder, self._limits, self._width = encoder, folder, limits, width

    @property
    def vocab_size(self) -> int:
        """The number of token ids; valid ids are below it."""
        return self._limits.vocab_size

    @property
    def kinds(self) -> tuple[PoolingKind, ...]:
        """The tasks that the model serves."""
        if isinstance(self._folder, EmbedderFolder):
            return ("embed",)
        return ("rerank", "classify") if len(self._folder.labels) == 1 else ("classify",)

    def can_resume(self, token_ids: list[int]) -> bool:
        """Return False, because the model does not generate."""
        return False

    @property
    def labels(self) -> tuple[str, ...]:
        return self._folder.labels if isinstance(self._folder, ClassifierFolder) else ()

    def process(self, **_: Any) -> NoReturn:
        """Raise UnsupportedFeature: the model does not generate."""
        raise self._refused("generate")

    parses_every_chat = False
    defaults = NO_DEFAULTS

    def process_chat(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedFeature: the model does not generate."""
        raise self._refused("generate")

    def process_score(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedFeature: the model does not score continuations."""
        raise self._refused("score")

    def process_pool(self, given: PoolInput) -> tuple[list[int], SamplingParams, Pool]:
        """Tokenize and check one request.

        Returns:
            The concatenated tokens of all texts; placeholder parameters; and the task.

        Raises:
            InvalidRequest: see the subclasses.
        """
        if given.kind not in self.kinds:
            raise self._refused(given.kind)
        if not given.texts:
            raise InvalidRequest("the job has no text")
        prompt = self._prompt(given)
        encoded = self._encoded(given, prompt)
        for number, text in enumerate(encoded):
            self._check(text.token_ids, number)
        task = Pool(
            kind=given.kind,
            lengths=tuple(len(text.token_ids) for text in encoded),
            width=self._dimensions(given) or self._width,
            second_starts=() if given.query is None else tuple(text.second_start for text in encoded),
            num_skipped=self._num_skipped(prompt),
            dimensions=self._dimensions(given),
        )
        return [token for text in encoded for token in text.token_ids], PARAMS, task

    def _refused(self, kind: str) -> UnsupportedFeature:
        what = {"embed": "gives vectors", "rerank": "scores pairs of texts", "classify": "classifies texts"}
        return UnsupportedFeature(
            f"the model {what[self.kinds[0]]} and does not accept {kind} jobs: "
            f"submit with task {' or '.join(self.kinds)}"
        )

    def _prompt(self, given: PoolInput) -> str:
        if isinstance(self._folder, ClassifierFolder):
            if given.prompt_name is not None:
                raise UnsupportedFeature("prompt_name: only a model that gives vectors has prompts")
            return ""
        name = given.prompt_name or self._folder.default_prompt_name
        if name is None:
            return ""
        if name not in self._folder.prompts:
            known = ", ".join(sorted(self._folder.prompts)) or "none"
            raise InvalidRequest(f"prompt_name: the model has no such prompt; it has {known}")
        return self._folder.prompts[name]

    def _encoded(self, given: PoolInput, prompt: str) -> list[EncodedText]:
        found: dict[int, EncodedText] = {}
        texts: dict[int, Text] = {}
        for number, text in enumerate(given.texts):
            if isinstance(text, str):
                texts[number] = self._prepared(text, prompt) if given.query is None else (given.query, text)
            elif given.query is not None or prompt:
                raise UnsupportedFeature("token ids can't follow a query or a prompt: give texts")
            else:
                ids = list(text)[: self._limits.max_model_len] if given.truncate else list(text)
                found[number] = EncodedText(ids, len(ids))
        if texts:
            if self._encoder is None:
                raise InvalidRequest("this model has no tokenizer; send token ids")
            found |= zip(texts, self._encoder.encode(list(texts.values())), strict=True)
        too_long = [n for n in texts if len(found[n].token_ids) > self._limits.max_model_len]
        if too_long and given.truncate and self._encoder is not None:
            cut = self._encoder.encode([texts[n] for n in too_long], shorten_to=self._limits.max_model_len)
            found |= zip(too_long, cut, strict=True)
        return [found[number] for number in range(len(given.texts))]

    def _prepared(self, text: str, prompt: str) -> str:
        is_lowered = isinstance(self._folder, EmbedderFolder) and self._folder.lowers_case
        return prompt + text.lower() if is_lowered else prompt + text

    def _check(self, token_ids: list[int], number: int) -> None:
        place = f"text {number}" if number else "the text"
        if not token_ids:
            raise InvalidRequest(f"{place} has no tokens")
        if any(type(token) is not int for token in token_ids):
            raise InvalidRequest(f"{place}: token ids must be integers")
        if min(token_ids) < 0 or max(token_ids) >= self._limits.vocab_size:
            raise InvalidRequest(f"{place}: token ids must be in [0, {self._limits.vocab_size})")
        if len(token_ids) > self._limits.max_model_len:
            raise PromptTooLong(
                f"{place} has {len(token_ids)} tokens, the model takes {self._limits.max_model_len}: shorten it, or "
                "ask for truncate"
            )

    def _num_skipped(self, prompt: str) -> int:
        folder = self._folder
        if not prompt or not isinstance(folder, EmbedderFolder) or folder.pooling.include_prompt:
            return 0
        assert self._encoder is not None, "a prompt was encoded"
        return self._encoder.num_leading_tokens(prompt)

    def _dimensions(self, given: PoolInput) -> int | None:
        if given.dimensions is None:
            return None
        if given.kind != "embed":
            raise UnsupportedFeature("dimensions: only vectors have them")
        if not 0 < given.dimensions <= self._width:
            raise InvalidRequest(
                f"dimensions: the model's vectors have {self._width}, ask for 1 to {self._width}"
            )
        return given.dimensions


@dataclass(frozen=True, slots=True)
class PoolingLimits:
    vocab_size: int
    max_model_len: int
    """Maximum number of tokens of a text."""

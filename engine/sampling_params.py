"""The sampling parameters of one request, validated once, at construction."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pagemill.common.bounds import InvalidParameter
from pagemill.common.sampling_fields import (
    DEFAULT_PROMPT_MAX_TOKENS,
    MAX_STOP_STRINGS,
    EarlyStopping,
    SamplingFields,
    TokenCount,
)
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM: any other choice would be due to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingFields):
    """Sampling parameters; `SamplingFields` defines them with their bounds. Raises `InvalidRequest`.

    `seed=None` draws one seed per request, so that a replay of the same request is a replay of its noise.
    `max_tokens=None` means the rest of the context. `structured_outputs` may be a mapping of its one field.
    """

    max_tokens: TokenCount | None = DEFAULT_PROMPT_MAX_TOKENS

    def __post_init__(self) -> None:
        stop: object = self.stop  # a bare string is accepted, though the type says tuple
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        shape = self.structured_outputs
        try:
            if shape is not None:
                object.__setattr__(self, "structured_outputs", StructuredOutputs.from_shape(shape))
        except InvalidParameter as error:
            raise InvalidRequest.with_code(error.code, f"structured_outputs: {error}") from None
        try:
            self.check()
        except InvalidParameter as error:
            raise InvalidRequest.with_code(error.code, str(error)) from None
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest("stop strings must be non-empty strings")
        if self.allowed_token_ids == ():
            raise InvalidRequest("allowed_token_ids must not be empty")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequest(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}'
            )

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most probable one, or the outputs come from a beam search."""
        return self.temperature < GREEDY_BELOW or self.beam_width is not None

    @property
    def is_certain(self) -> bool:
        """True if the output does not depend on the seed."""
        return self.is_greedy or self.label_probs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, named as in vLLM; all `beam_width` hypotheses are returned."""

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the same parameters as `SamplingParams`.

        Returns:
            Sampling parameters with all other fields at their defaults.

        Raises:
            InvalidRequest: a parameter is out of range.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(n=self.beam_width, **given)

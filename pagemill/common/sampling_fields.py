"""The sampling fields of a job, declared once: types, bounds, defaults, and contradictions.

A job on the wire, the engine's `SamplingParams` and the argument types of `submit` are all derived from
`SamplingFields`. A new field is declared here, and used where the engine acts on it. No heavy imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, get_args

from pagemill.common.bounds import Exact, InvalidParameter, Length, Range, check_ranges
from pagemill.common.structured_outputs import ShortText, StructuredOutputs

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_LENGTH_PENALTY = 10.0
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 1e-3
MAX_REPETITION_PENALTY = 1e3
MAX_BIAS = 1e6
"""In either direction. A larger bias would absorb the logits that it is added to, in fp32."""
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields for which a model may have its own defaults: a job that sets one to Pagemill's default says so."""
DEFAULT_PROMPT_MAX_TOKENS = 16
"""`max_tokens` of a plain prompt that names none; a chat gets the rest of the context."""

EarlyStopping = Annotated[bool, Exact()] | Literal["never"]
"""The end of a beam search that has as many finished beams as its width. True: immediately. False: when no live
beam would beat the worst of them as it stands. "never": when no live beam can beat it at any length."""

LabelProbs = Literal["product", "mean", "constrained"]
"""How a label's probability follows from those of its tokens. All are normalized over the labels. "product": the
product of the model's own probabilities. "mean": its root by the number of tokens, so that long labels are no less
likely for being long. "constrained": as a choice is drawn at temperature 1, token by token among those that lead to a
label; tokens that are forced count nothing, and are not computed."""

_Flag = Annotated[bool, Exact()]
_Samples = Annotated[int, Exact(), Range(1, MAX_N)]
TokenCount = Annotated[int, Exact(), Range(1, MAX_TOKEN_ID)]
_Penalty = Annotated[float, Exact(), Range(-2.0, 2.0)]
_TopLogprobs = Annotated[int, Exact(), Range(0, MAX_LOGPROBS)]
TokenId = Annotated[int, Exact(), Range(0, MAX_TOKEN_ID)]
_BIASES = Range(-MAX_BIAS, MAX_BIAS)
Bias = Annotated[float, Exact(), _BIASES]


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The sampling parameters of a request, named as in OpenAI's and vLLM's APIs.

    `temperature` 0 is greedy, and so is any below 1e-5. `top_k` 0 or -1, `top_p` 1.0 and `min_p` 0.0 switch their
    filter off. For a job that leaves out one of `MODEL_DEFAULTS`, the default of the model's generation_config.json
    comes before the default here.
    """

    n: _Samples = 1
    best_of: _Samples | None = None
    """Samples drawn, of which the n most probable are returned, best first."""
    beam_width: _Samples | None = None
    """Beams of a search that replaces sampling and returns the n best hypotheses, ranked by cumulative log-probability
    / length ** length_penalty."""
    length_penalty: Annotated[float, Exact(), Range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)] = 1.0
    early_stopping: EarlyStopping = False
    max_tokens: TokenCount | None = None
    """None: 16 for a prompt, the rest of the context for messages."""
    min_tokens: Annotated[int, Exact(), Range(0, MAX_TOKEN_ID)] = 0
    temperature: Annotated[float, Exact(), Range(0.0, MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Exact(), Range(-1, MAX_TOKEN_ID)] = 0
    top_p: Annotated[float, Exact(), Range(0.0, 1.0, above=True)] = 1.0
    min_p: Annotated[float, Exact(), Range(0.0, 1.0)] = 0.0
    seed: Annotated[int, Exact(), Range(0, MAX_SEED)] | None = None
    """None: drawn per request."""
    stop: Annotated[tuple[ShortText, ...], Length(0, MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Length(0, MAX_STOP_TOKEN_IDS)] = ()
    include_stop_str_in_output: _Flag = False
    ignore_eos: _Flag = False
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Exact(), Range(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)] = 1.0
    logit_bias: Annotated[Mapping[int, Bias], Length(0, MAX_LOGIT_BIAS)] = field(default_factory=dict)
    allowed_token_ids: Annotated[tuple[TokenId, ...], Length(1, MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[tuple[ShortText, ...], Length(0, MAX_BAD_WORDS)] = ()
    logprobs: _TopLogprobs | None = None
    prompt_logprobs: _TopLogprobs | None = None
    truncate_prompt_tokens: TokenCount | None = None
    skip_special_tokens: _Flag = True
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Annotated[int, Exact(), Range(0, MAX_TOKEN_ID)] | None = None
    """Most tokens of thinking: after them the closing tag is forced."""
    label_probs: LabelProbs | None = None
    """Return the probability of every label of `structured_outputs.choice`, and the most probable label."""

    @property
    def num_sequences(self) -> int:
        """Sequences that run concurrently for one request."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """True if the returned samples are known only at the end."""
        return self.beam_width is not None or self.num_sequences > self.n

    def check(self) -> None:
        """Check numbers against their ranges, and fields against each other. Raises InvalidParameter."""
        check_ranges(self)
        for bias in self.logit_bias.values():
            if bias not in _BIASES:
                raise InvalidParameter(f"logit_bias values must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
        self.check_together()

    def check_together(self) -> None:
        """Check that fields do not contradict each other. Raises InvalidParameter."""
        if self.label_probs is not None:
            self._check_labels()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens must not exceed max_tokens")
        for name in ("best_of", "beam_width"):
            count = getattr(self, name)
            if count is not None and count < self.n:
                raise InvalidParameter(f"{name} ({count}) must not be less than n ({self.n})")
        if self.beam_width is None:
            if self.length_penalty != 1.0 or self.early_stopping is not False:
                raise InvalidParameter("length_penalty and early_stopping need a beam_width")
            return
        # The values that switch a field off, where there are others than its default.
        off = {"temperature": (0.0, 1.0), "top_k": (0, -1)}
        others = [name for name in SAMPLING_FIELDS if name not in _BEAM_FIELDS]
        if names := [
            name for name in others if getattr(self, name) not in off.get(name, (getattr(_DEFAULTS, name),))
        ]:
            raise InvalidParameter(
                f"a beam search cannot be combined with {', '.join(names)}", "unsupported_feature"
            )

    def _check_labels(self) -> None:
        """Reject what would change the probabilities of labels, or ask for more than one of them."""
        if self.label_probs not in get_args(LabelProbs):
            raise InvalidParameter(f"label_probs must be one of {', '.join(get_args(LabelProbs))}")
        shape = self.structured_outputs
        if shape is None or shape.choice is None:
            raise InvalidParameter("label_probs needs structured_outputs with a choice")
        if len(set(shape.choice)) < len(shape.choice):
            raise InvalidParameter("label_probs: two labels of the choice are equal")
        others = [name for name in SAMPLING_FIELDS if name not in _LABEL_FIELDS]
        if names := [name for name in others if getattr(self, name) != getattr(_DEFAULTS, name)]:
            raise InvalidParameter(
                f"label_probs cannot be combined with {', '.join(names)}", "unsupported_feature"
            )


SAMPLING_FIELDS = tuple(declared.name for declared in fields(SamplingFields))
_LABEL_FIELDS = frozenset({
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "include_stop_str_in_output", "ignore_eos",
    "truncate_prompt_tokens", "skip_special_tokens", "structured_outputs", "label_probs", "length_penalty",
    "early_stopping",
})  # fmt: skip
"""The fields that leave label probabilities as they are. Any other field is rejected next to `label_probs`."""
_BEAM_FIELDS = frozenset({
    "n", "beam_width", "length_penalty", "early_stopping", "max_tokens", "min_tokens", "seed", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
    "skip_special_tokens",
})  # fmt: skip
"""The fields that a beam search takes. Any other field is rejected next to `beam_width`."""
_DEFAULTS = SamplingFields()

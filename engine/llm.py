"""Offline generation: a list of prompts in, a list of results out, all in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.adapters.source import obtain_adapter
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import ConfigError
from pagemill.engine.offline_order import merge_equal, rank_by_prefix
from pagemill.engine.outputs import CompletionDelta, FinishReason, RequestOutput, Usage
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.sampling_params import BeamSearchParams, SamplingParams
from pagemill.engine.text.tokenizer import Message

Prompt = str | Sequence[int]
AdapterNames = str | Sequence[str | None] | None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of its tokens; set for ranked samples, beams and labels."""
    label_probs: tuple[float, ...] | None = None
    """The probability of each label of the choice, in its order; None unless requested."""

    def extend(self, delta: CompletionDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.cumulative_logprob = delta.cumulative_logprob
        self.label_probs = delta.label_probs


@dataclass(slots=True)
class GenerationOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    error_code: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, None for the first; None unless requested."""


class LLM:
    """A model in this process.

    Args:
        model: a folder, `org/name[@revision]` of the Hugging Face Hub, `modelscope:org/name[@revision]`,
            `smollm2` or `echo`.
        options: the fields of `EngineConfig`.

    Raises:
        ConfigError: the model can't be loaded, or a setting is invalid.
        EngineError: a hub does not answer, or a disk is full.
    """

    def __init__(self, model: str, **options: Any) -> None:
        try:
            self.engine = Engine.from_config(EngineConfig(model=model, **options))
        except ModuleNotFoundError as error:
            needed = (
                f"{error.name} is missing; a model needs more than a producer: pip install 'pagemill[worker]'"
            )
            raise ConfigError(needed) from error
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterNames = None,
        use_tqdm: bool | None = None,
    ) -> list[GenerationOutput]:
        """Complete every prompt; results are in the order given.

        Prompts with a common beginning run one after another, and requests with necessarily equal outputs run
        once.

        Args:
            prompts: strings (special tokens are added) or lists of token ids; a single one counts as a list of one.
            sampling_params: one for all, or one each.
            adapter: the name of an adapter, of `adapters=` or `add_adapter`: one for all, or one each. None: the model
                as it is.
            use_tqdm: a progress bar on stderr; None: if stderr is a terminal.

        Raises:
            InvalidRequest: one of the prompts can't run; nothing has been generated.
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Any] = [prompts] if is_one else list(prompts)
        inputs = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in listed]
        params = self._params_for(len(inputs), sampling_params, SamplingParams())
        return self._run(inputs, params, self._adapters_for(len(inputs), adapter), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
    ) -> list[GenerationOutput]:
        """Return the `beam_width` best continuations of every prompt, best first.

        Raises:
            InvalidRequest: one of the prompts can't run; nothing has been generated.
        """
        return self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterNames = None,
        use_tqdm: bool | None = None,
    ) -> list[GenerationOutput]:
        """As `generate`, through the model's chat template; `max_tokens` defaults to the rest of the context."""
        is_one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        listed: list[Any] = [conversations] if is_one else list(conversations)
        inputs = [{"messages": messages} for messages in listed]
        params = self._params_for(len(inputs), sampling_params, SamplingParams(max_tokens=None))
        return self._run(inputs, params, self._adapters_for(len(inputs), adapter), use_tqdm)

    def add_adapter(self, name: str, source: str) -> None:
        """Let prompts name an adapter, a PEFT folder; of the same name, it replaces the earlier one.

        Raises:
            ConfigError: it can't be used with this model; the message says why.
        """
        self.engine.adapters.add(name, obtain_adapter(source))

    def close(self) -> None:
        """Free the weights and the KV cache, and end the other processes of a model spread over several.

        All that also goes with this object. Later calls of `generate` raise `DeviceLost`.
        """
        self.engine.close()

    @staticmethod
    def _params_for(
        count: int, given: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or default] * count
        if len(given) != count:
            raise ValueError(f"{len(given)} sampling_params for {count} prompts; give one, or one each")
        return list(given)

    def _adapters_for(self, count: int, given: AdapterNames) -> list[Adapter | None]:
        names: list[str | None] = [given] * count if given is None or isinstance(given, str) else list(given)
        if len(names) != count:
            raise ValueError(f"{len(names)} adapters for {count} prompts; give one, or one each")
        return [None if name is None else self.engine.adapters.find(name) for name in names]

    def _run(
        self,
        inputs: list[dict[str, Any]],
        params: list[SamplingParams],
        adapters: list[Adapter | None],
        use_tqdm: bool | None,
    ) -> list[GenerationOutput]:
        prepared = [
            self.engine.input_processor.process(**given, params=one)
            for given, one in zip(inputs, params, strict=True)
        ]
        first = merge_equal(prepared, [None if adapter is None else adapter.digest for adapter in adapters])
        # The running order, not the clock: a million prompts may share one reading of it.
        ranks = rank_by_prefix([token_ids for token_ids, _ in prepared])
        base = self._num_requests
        self._num_requests += len(prepared)
        results: dict[str, GenerationOutput] = {}
        try:
            for number, (given, (token_ids, one)) in enumerate(zip(inputs, prepared, strict=True)):
                if first[number] != number:
                    continue
                request_id = f"llm-{base + number}"
                arrival = float(base + ranks[number])
                adapter = adapters[number]
                self.engine.add_request(request_id, token_ids, one, arrival=arrival, adapter=adapter)
                outputs = [CompletionOutput(index) for index in range(one.n)]
                results[request_id] = GenerationOutput(request_id, given.get("prompt"), token_ids, outputs)
            self._drive(results, sys.stderr.isatty() if use_tqdm is None else use_tqdm)
        except BaseException:
            for request_id in results:
                self.engine.abort(request_id)
            raise
        return [
            results[f"llm-{base + number}"]
            if first[number] == number
            else _repeat(results[f"llm-{base + first[number]}"], f"llm-{base + number}", given.get("prompt"))
            for number, given in enumerate(inputs)
        ]

    def _drive(self, results: dict[str, GenerationOutput], show_progress: bool) -> None:
        bar = None
        if show_progress:
            from tqdm import tqdm

            bar = tqdm(total=len(results), desc="generating", unit="prompt")
        try:
            while self.engine.has_unfinished():
                finished = sum(_collect(results[output.request_id], output) for output in self.engine.step())
                if bar is not None and finished:
                    bar.update(finished)
        finally:
            if bar is not None:
                bar.close()


def _repeat(result: GenerationOutput, request_id: str, prompt: str | None) -> GenerationOutput:
    """Copy an equal request's result, sharing nothing that a caller may change."""
    return replace(deepcopy(result), request_id=request_id, prompt=prompt)


def _collect(result: GenerationOutput, output: RequestOutput) -> bool:
    """Add a step's output to the result; True if it is complete."""
    for delta in output.deltas:
        result.outputs[delta.index].extend(delta)
    if output.finished:
        result.usage, result.prompt_logprobs = output.usage or Usage(), output.prompt_logprobs
        result.error, result.error_code = output.error, output.error_code
    return output.finished

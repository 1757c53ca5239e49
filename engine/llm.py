"""Offline generation in this process, from a list of prompts to a list of results."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.adapters.source import obtain_adapter
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import ConfigError
from pagemill.engine.media import MediaItem
from pagemill.engine.offline_order import merge_equal, rank_by_prefix
from pagemill.engine.outputs import CompletionDelta, FinishReason, RequestOutput, Usage
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.sampling_params import BeamSearchParams, SamplingParams
from pagemill.engine.tasks import GENERATE, Task
from pagemill.engine.text.chat import ChatOptions
from pagemill.engine.text.tokenizer import Message

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
ToolChoice = Literal["none", "auto", "required"] | str
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
        EngineError: a hub does not respond, or a disk is full.
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
        """Complete every prompt.

        Prompts with a common prefix run consecutively, and requests with necessarily equal outputs run once.

        Args:
            prompts: strings (special tokens are added) or token ids, as lists or arrays, or vLLM's dicts of either
                (`prompt`, `prompt_token_ids`); a single one counts as a list of one.
            sampling_params: one for all, or one each; by default the model's, as `default_sampling_params` returns.
            adapter: name of an adapter, of `adapters=` or `add_adapter`: one for all, or one each. None: no adapter.
            use_tqdm: a progress bar on stderr; None: if stderr is a terminal.

        Returns:
            One output per prompt, in the order of the prompts. An output of a request that failed has an `error`.

        Raises:
            InvalidRequest: one of the prompts cannot run; nothing has been generated.
            TypeError: a prompt or its parameters have another type.
        """
        inputs = _read_prompts(prompts)
        params = self._params_for(len(inputs), sampling_params, self.default_sampling_params())
        return self._run(inputs, params, self._adapters_for(len(inputs), adapter), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
    ) -> list[GenerationOutput]:
        """Return the `beam_width` best continuations of every prompt, best first.

        Args:
            prompts: strings or lists of token ids; a single one counts as a list of one.
            params: width, length and penalties of the search.
            use_tqdm: a progress bar on stderr; None: if stderr is a terminal.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            InvalidRequest: one of the prompts cannot run; nothing has been generated.
        """
        return self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        adapter: AdapterNames = None,
        use_tqdm: bool | None = None,
    ) -> list[GenerationOutput]:
        """Complete conversations through the model's chat template.

        Args:
            conversations: lists of messages; a single one counts as a list of one. A user's content may be a list of
                parts: `{"type": "text", "text": ...}`, and `{"type": "image", "image": ...}` with a file's bytes.
            sampling_params: one for all, or one each; by default the model's, and `max_tokens` is the rest of the
                context or the model's max_new_tokens.
            tools: functions that the model may call, in OpenAI's form. An output's text contains the calls as the model
                writes them.
            tool_choice: "required", or the name of a function, forces a call that the schemas allow.
            chat_template_kwargs: variables for the template, such as `enable_thinking`.
            reasoning_effort: for templates that support it; "none" disables reasoning where the template has a switch.
            adapter: name of an adapter: one for all, or one each. None: no adapter.
            use_tqdm: a progress bar on stderr; None: if stderr is a terminal.

        Returns:
            One output per conversation, in the order of the conversations.

        Raises:
            InvalidRequest: one of the conversations cannot run; nothing has been generated.
        """
        is_one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        listed: list[Any] = [conversations] if is_one else list(conversations)
        processor = self.engine.input_processor
        inputs: list[dict[str, Any]] = [{"messages": processor.read_images(messages)} for messages in listed]
        if tools or chat_template_kwargs or reasoning_effort is not None:
            is_free = tool_choice in ("none", "auto", "required")
            options = ChatOptions(
                tools=tools,
                choice=tool_choice if is_free else "required",  # type: ignore[arg-type]
                function=None if is_free else tool_choice,
                template_kwargs=chat_template_kwargs or {},
                reasoning_effort=reasoning_effort,
            )
            inputs = [{**given, "options": options} for given in inputs]
        params = self._params_for(
            len(inputs), sampling_params, replace(self.default_sampling_params(), max_tokens=None)
        )
        return self._run(inputs, params, self._adapters_for(len(inputs), adapter), use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters, including those of the model's generation_config.json.

        Returns:
            A copy of it with further fields is `dataclasses.replace(params, ...)`.
        """
        return SamplingParams(**self.engine.input_processor.defaults.sampling)  # type: ignore[arg-type]

    def add_adapter(self, name: str, source: str) -> None:
        """Load a LoRA adapter. It replaces an earlier adapter of the same name.

        Args:
            name: the name that prompts use.
            source: a PEFT folder, or `org/name[@revision]` of the Hugging Face Hub.

        Raises:
            ConfigError: the adapter cannot be used with this model.
        """
        self.engine.adapters.add(name, obtain_adapter(source))

    def close(self) -> None:
        """Free the weights and the KV cache, and stop the processes of ranks and of schemas.

        The same happens when this object is deleted. Later calls of `generate` raise `DeviceLost`.
        """
        self.engine.close()

    @staticmethod
    def _params_for(
        count: int, given: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or default] * count
        if isinstance(given, Mapping):
            raise TypeError("sampling_params is a SamplingParams, not a dict: write SamplingParams(**params)")
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
        tasks: list[Task] = []
        prepared: list[tuple[list[int], SamplingParams]] = []
        for given, one in zip(inputs, params, strict=True):
            if "options" in given:
                token_ids, checked, task, _ = self.engine.input_processor.process_chat(**given, params=one)
            else:
                (token_ids, checked), task = (
                    self.engine.input_processor.process(**given, params=one),
                    GENERATE,
                )
            prepared.append((token_ids, checked))
            tasks.append(task)
        processor = self.engine.input_processor
        media = [
            processor.media_of(token_ids, given.get("messages"))
            for given, (token_ids, _) in zip(inputs, prepared, strict=True)
        ]
        first = merge_equal(prepared, list(map(_merge_key, adapters, media)))
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
                self.engine.add_request(
                    request_id, token_ids, one, arrival=arrival, task=tasks[number], adapter=adapters[number],
                    media=media[number],
                )  # fmt: skip
                outputs = [CompletionOutput(index) for index in range(one.n)]
                results[request_id] = GenerationOutput(request_id, given.get("prompt"), token_ids, outputs)
            self._drive(results, sys.stderr.isatty() if use_tqdm is None else use_tqdm)
        except BaseException:
            for request_id in results:
                self.engine.abort(request_id)
            raise
        failed = [result.error for result in results.values() if result.error is not None]
        if failed:
            logger.warning("%d of %d requests failed, the first: %s", len(failed), len(results), failed[0])
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


def _read_prompts(prompts: Any) -> list[dict[str, Any]]:
    """Return the input processor's arguments for each prompt. Raises TypeError."""
    given = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(given, str | Mapping) or (
        isinstance(given, Sequence) and given and isinstance(given[0], Integral)
    ):
        given = [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"prompts are texts or token ids, not {type(prompts).__name__}")
    return [_read_prompt(one) for one in given]


def _read_prompt(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        match {name: value for name, value in prompt.items() if value is not None}:
            case {"prompt_token_ids": ids, **rest} if rest.keys() <= {"prompt"}:
                prompt = ids
            case {"prompt": str(text), **rest} if not rest:
                return {"prompt": text}
            case _:
                raise TypeError("a prompt that is a dict has prompt or prompt_token_ids, and nothing else")
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence):
        raise TypeError(f"a prompt is a text or token ids, not {type(prompt).__name__}")
    if ids and hasattr(ids[0], "item"):  # numpy or torch scalars
        ids = [one.item() for one in ids]
    return {"prompt_token_ids": ids}


def _merge_key(adapter: Adapter | None, media: Sequence[MediaItem]) -> str | None:
    """Return the key that distinguishes requests with equal tokens."""
    if adapter is None and not media:
        return None
    return " ".join(["" if adapter is None else adapter.digest, *(item.digest.hex() for item in media)])


def _repeat(result: GenerationOutput, request_id: str, prompt: str | None) -> GenerationOutput:
    """Copy an equal request's result, without sharing mutable objects."""
    return replace(deepcopy(result), request_id=request_id, prompt=prompt)


def _collect(result: GenerationOutput, output: RequestOutput) -> bool:
    """Add a step's output to the result; True if it is complete."""
    for delta in output.deltas:
        result.outputs[delta.index].extend(delta)
    if output.finished:
        result.usage, result.prompt_logprobs = output.usage or Usage(), output.prompt_logprobs
        result.error, result.error_code = output.error, output.error_code
    return output.finished

"""Forward passes, from a step's inputs to its logits: the interface, and the model's forward pass.

The others are `DecodeGraphs` and `PromptScorer`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pagemill.engine.execution.input_batch import StepInputs
from pagemill.engine.execution.sampling.logprobs import PromptLogprobs, ReadLogprobs
from pagemill.engine.execution.sampling.narrow_head import NarrowHead, NarrowVocabulary
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.layers.attention import AttentionContext, attention_context
from pagemill.engine.layers.direct_forward import DirectForward
from pagemill.engine.plan import StepPlan
from pagemill.kernels.types.layer_cache import LayerCache


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward pass's output, for the sampler."""

    logits: torch.Tensor
    """[num_samples, vocab_size], or of the narrow vocabulary."""
    vocabulary: NarrowVocabulary | None = None
    """The tokens of the logits; None: all."""
    scored: list[PromptLogprobs] = field(default_factory=list)
    reads: ReadLogprobs | None = None


class ForwardPass(Protocol):
    replays: bool
    """True if a captured graph runs it, with its inputs padded to a bucket."""

    def covers(self, plan: StepPlan) -> bool: ...

    def run(self, plan: StepPlan, inputs: StepInputs, work: list[SampleWork]) -> Forwarded: ...


class ModelForward:
    """Runs any other step, through the model or a replacement of transformers' forward."""

    replays = False

    def __init__(
        self,
        module: torch.nn.Module,
        caches: list[LayerCache],
        direct: DirectForward | None,
    ) -> None:
        self._module, self._caches, self._direct = module, caches, direct
        self._narrow_head = NarrowHead.from_module(module)
        self._skips_unread = any(getattr(part, "is_last", False) for part in module.modules())

    def covers(self, plan: StepPlan) -> bool:
        return True

    def run(self, plan: StepPlan, inputs: StepInputs, work: list[SampleWork]) -> Forwarded:
        head: AbstractContextManager[None] = nullcontext()
        vocabulary = self._narrow_head.vocabulary(work) if self._narrow_head is not None else None
        if self._narrow_head is not None and vocabulary is not None:
            head = self._narrow_head.only(vocabulary.token_ids)
        read_tokens = self._read_tokens(plan, inputs)
        context = AttentionContext(inputs.metadata, self._caches, read_tokens, inputs.media)
        with head, attention_context(context):
            return Forwarded(self._logits(plan, inputs, read_tokens), vocabulary)

    def _logits(self, plan: StepPlan, inputs: StepInputs, read_tokens: torch.Tensor | None) -> torch.Tensor:
        """Return logits [num_samples, tokens], of the narrow vocabulary if there is one."""
        if self._direct is None or plan.has_adapters:
            # An empty index would mean every token to some families; one row is the minimum.
            read = inputs.logits_indices if plan.samples else inputs.positions.new_zeros(1)
            return transformers_logits(self._module, inputs, logits_to_keep=read)
        is_all = len(plan.samples) == len(inputs.positions) and are_first_tokens(plan)
        return self._direct.logits(
            inputs.input_ids,
            inputs.positions,
            self._caches,
            inputs.metadata,
            read_tokens,
            None if is_all else inputs.logits_indices,
            inputs.media,
        )

    def _read_tokens(self, plan: StepPlan, inputs: StepInputs) -> torch.Tensor | None:
        """Return the tokens whose last hidden states the head reads, without duplicates; None: possibly all."""
        if not self._skips_unread or len(plan.samples) >= len(inputs.positions):
            return None
        if not plan.samples:
            return inputs.positions.new_zeros(1)  # the index that `_logits` uses
        return torch.tensor(sorted({sample.token_index for sample in plan.samples}))


def transformers_logits(module: Any, inputs: StepInputs, **options: Any) -> torch.Tensor:
    logits: torch.Tensor = module(**model_inputs(module, inputs), **options).logits[0]
    return logits


def model_inputs(module: Any, inputs: StepInputs) -> dict[str, Any]:
    """Return the arguments of transformers' forward for a step."""
    given = {"position_ids": inputs.positions[None], "use_cache": False}
    if inputs.media is None:
        return {"input_ids": inputs.input_ids[None], **given}
    embeddings = inputs.media.embed(module.get_input_embeddings(), inputs.input_ids)
    return {"inputs_embeds": embeddings[None], **given}


def are_first_tokens(plan: StepPlan) -> bool:
    """Return True if the samples belong to the step's first tokens, one each and in order."""
    return all(sample.token_index == number for number, sample in enumerate(plan.samples))

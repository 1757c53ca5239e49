"""Forward passes that also return log probabilities of given tokens, of the prompt or of labels.

Every prompt position needs logits, and a long chunk times a large vocabulary can exceed the memory of the
entire KV cache. The model therefore runs up to its last hidden states, and its head runs over one slice of
them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pagemill.engine.execution.forward_pass import Forwarded, model_inputs
from pagemill.engine.execution.input_batch import InputBatch, StepInputs
from pagemill.engine.execution.sampling.logprobs import PromptLogprobs, ReadLogprobs, TopLogprobs
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.layers.attention import AttentionContext, attention_context
from pagemill.engine.layers.direct_forward import DirectForward
from pagemill.engine.plan import StepPlan
from pagemill.kernels.types.layer_cache import LayerCache

_SLICE = 128
"""Number of positions whose logits exist at the same time."""


class PromptScorer:
    """Runs a causal language model in two halves.

    The head is the module's forward over given hidden states: a family's changes to its logits after the
    matmul (a softcap, a scale) do not need a second implementation.
    """

    replays = False

    def __init__(
        self,
        module: Any,
        caches: list[LayerCache],
        batch: InputBatch,
        direct: DirectForward | None = None,
    ) -> None:
        """`module` is one of transformers' causal language models; `direct` replaces its forward."""
        self._module, self._direct = module, direct
        self._skips_unread = any(getattr(part, "is_last", False) for part in module.modules())
        decoder = module.get_decoder()
        # transformers searches for an attribute called `decoder`, which in some models is the head.
        self._decoder = decoder if decoder is not module.get_output_embeddings() else module.base_model
        self._caches = caches
        self._batch = batch
        self._output_type: Any = None

    def covers(self, plan: StepPlan) -> bool:
        knows_adapters = self._direct is None
        return any(work.is_scored for work in plan.work) and (knows_adapters or not plan.has_adapters)

    def run(self, plan: StepPlan, inputs: StepInputs, work: list[SampleWork]) -> Forwarded:
        read_tokens = self._read_tokens(plan)
        with attention_context(AttentionContext(inputs.metadata, self._caches, read_tokens, inputs.media)):
            hidden = self._hidden_states(inputs, read_tokens)
            scored, begin = [], 0
            for index, row in enumerate(plan.work):
                if row.num_prompt_logprobs is not None:
                    # The last given token predicts output.
                    given = self._batch.row(row.row).num_prompt_tokens
                    first, end = row.first_scored, min(row.start + row.num_tokens + 1, given)
                    predicting = hidden[begin + first - 1 - row.start : begin + end - 1 - row.start]
                    targets = self._batch.token_table[row.row, first:end]
                    slices = self._score(predicting, targets, row.num_prompt_logprobs)
                    scored.append(PromptLogprobs(index, slices))
                begin += row.num_tokens
            sampled = inputs.logits_indices
            logits = self._head(hidden[sampled]) if len(sampled) else hidden[:0]
            return Forwarded(logits, scored=scored, reads=self._read(plan, inputs.reads, hidden))

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Return every token's logits, computed from their hidden states; call it inside an attention context."""
        return self._head(self._hidden_states(inputs))

    def _read_tokens(self, plan: StepPlan) -> torch.Tensor | None:
        """Return the tokens whose last hidden states are read, without duplicates; None: possibly all."""
        if not self._skips_unread or any(work.num_prompt_logprobs is not None for work in plan.work):
            return None
        read, begin = {sample.token_index for sample in plan.samples}, 0
        for work in plan.work:
            read.update(begin + place for place, _ in work.reads)
            begin += work.num_tokens
        return torch.tensor(sorted(read)) if len(read) < begin else None

    def _hidden_states(self, inputs: StepInputs, read_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the decoder's last hidden states, [num_tokens, hidden_size], before or after its last norm."""
        if self._direct is not None:
            return self._direct.hidden_states(
                inputs.input_ids, inputs.positions, self._caches, inputs.metadata, read_tokens, inputs.media
            )
        output = self._decoder(**model_inputs(self._module, inputs))
        self._output_type = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, count: int) -> list[TopLogprobs]:
        slices = []
        for begin in range(0, len(targets), _SLICE):
            wanted = targets[begin : begin + _SLICE]
            logits = self._head(hidden[begin : begin + len(wanted)]).float()
            slices.append(
                TopLogprobs.from_logprobs(logits.log_softmax(dim=-1), wanted, [count] * len(wanted))
            )
        return slices

    def _read(
        self, plan: StepPlan, places: tuple[torch.Tensor, torch.Tensor] | None, hidden: torch.Tensor
    ) -> ReadLogprobs | None:
        """Return the log probabilities for the plan's reads, whose rows share the head's matmuls."""
        if places is None:
            return None
        tokens, pairs = places
        reads = [(index, len(ids)) for index, row in enumerate(plan.work) for _, ids in row.reads]
        slices, begin = [], 0
        for first in range(0, len(reads), _SLICE):
            logprobs = self._head(hidden[tokens[first : first + _SLICE]]).float().log_softmax(dim=-1)
            end = begin + sum(length for _, length in reads[first : first + _SLICE])
            numbers, token_ids = pairs[0, begin:end] - first, pairs[1, begin:end]
            slices.append(logprobs[numbers, token_ids].clamp(min=torch.finfo(torch.float32).min))
            begin = end
        return ReadLogprobs(reads, slices)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to [num_tokens, vocab_size]."""
        if self._direct is not None:
            return self._direct.head(hidden)
        placeholder = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with self._decoder_gives(hidden):
            logits: torch.Tensor = self._module(
                input_ids=placeholder, position_ids=placeholder, use_cache=False
            ).logits
        return logits[0]

    @contextmanager
    def _decoder_gives(self, hidden: torch.Tensor) -> Iterator[None]:
        """Make the decoder return `hidden`, computing nothing, until the end of the block."""
        output = self._output_type(last_hidden_state=hidden[None])
        replaced = self._decoder.__dict__.get("forward")
        self._decoder.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self._decoder.forward
            if replaced is not None:
                self._decoder.forward = replaced

"""Forward passes that also tell how likely the prompt's own tokens were (`prompt_logprobs`).

Every prompt position needs logits, and a long chunk times a large vocabulary is more memory than the whole KV
cache may have. So the model runs up to its last hidden states, and its head runs over a slice of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.execution.sampling.logprobs import TopLogprobs
from pagemill.engine.plan import StepPlan, TokenLogprobs

_SLICE = 128
"""Positions whose logits exist at the same time."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of one row's chunk, still on the device."""

    work_index: int
    slices: list[TopLogprobs]

    def to_host(self) -> list[TokenLogprobs]:
        return [entry for one in self.slices for entry in one.to_host()]


class PromptScorer:
    """Runs a causal language model in two halves.

    The head is the module's own forward over hidden states that are there already: whatever a family does to its
    logits after the product (a softcap, a scale) happens without being written down a second time.
    """

    def __init__(self, module: Any) -> None:
        """`module` is one of transformers' causal language models."""
        self._module = module
        self._decoder = module.get_decoder()
        self._output_type: Any = None

    def forward(
        self,
        plan: StepPlan,
        input_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        logits_indices: torch.Tensor,  # [num_samples], into the step's tokens
        token_table: torch.Tensor,  # [num_rows, max_len]
        num_prompt_tokens: Callable[[int], int],
    ) -> tuple[torch.Tensor, list[PromptLogprobs]]:
        """One step, instead of the module's forward.

        Args:
            num_prompt_tokens: of the sequence in a row.

        Returns:
            Logits [num_samples, vocab_size], and the log probabilities that the plan's work asks for.
        """
        output = self._decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        self._output_type = type(output)
        hidden = output.last_hidden_state[0]
        scored, begin = [], 0
        for index, work in enumerate(plan.work):
            if work.num_prompt_logprobs is not None:
                # The last token of the prompt predicts output.
                first, end = (
                    work.first_scored,
                    min(work.start + work.num_tokens + 1, num_prompt_tokens(work.row)),
                )
                predicting = hidden[begin + first - 1 - work.start : begin + end - 1 - work.start]
                slices = self._score(predicting, token_table[work.row, first:end], work.num_prompt_logprobs)
                scored.append(PromptLogprobs(index, slices))
            begin += work.num_tokens
        logits = self._head(hidden[logits_indices]) if len(logits_indices) else hidden[:0]
        return logits, scored

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, count: int) -> list[TopLogprobs]:
        slices = []
        for begin in range(0, len(targets), _SLICE):
            wanted = targets[begin : begin + _SLICE]
            logits = self._head(hidden[begin : begin + len(wanted)]).float()
            slices.append(TopLogprobs.of(logits.log_softmax(dim=-1), wanted, [count] * len(wanted)))
        return slices

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to [num_tokens, vocab_size]."""
        placeholder = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with self._decoder_gives(hidden):
            logits: torch.Tensor = self._module(
                input_ids=placeholder, position_ids=placeholder, use_cache=False
            ).logits
        return logits[0]

    @contextmanager
    def _decoder_gives(self, hidden: torch.Tensor) -> Iterator[None]:
        """Until the end of the block the decoder computes nothing and returns `hidden`."""
        output = self._output_type(last_hidden_state=hidden[None])
        replaced = self._decoder.__dict__.get("forward")
        self._decoder.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self._decoder.forward
            if replaced is not None:
                self._decoder.forward = replaced

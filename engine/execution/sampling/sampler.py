"""Selects tokens from logits. Each processor affects only the rows that request it; a greedy row costs one argmax.

Order: logprobs from raw logits; then `logits_processors`; then temperature and `logits_filters`; then
argmax of logits + Gumbel noise, which draws from their softmax. The noise is a function of (seed, sample,
position, token), so a row's draw does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pagemill.engine.execution.sampling.device_draws import StagedDraws, draw, stage_draws
from pagemill.engine.execution.sampling.filters import filter_logits
from pagemill.engine.execution.sampling.logprobs import TopLogprobs
from pagemill.engine.execution.sampling.narrow_head import NarrowVocabulary
from pagemill.engine.execution.sampling.processors import LogitsProcessors, SampleWork
from pagemill.engine.execution.sampling.staged_changes import StagedChanges
from pagemill.engine.execution.staging import DirectTransfer, Transfer
from pagemill.engine.plan import StepResult
from pagemill.kernels.noise import argmax_of_sums, noise_keys
from pagemill.kernels.selection import argmax_with_noise, largest


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens, on the device: reading any field waits for its queued work."""

    token_ids: torch.Tensor  # [num_samples] int64
    is_valid: torch.Tensor  # [num_samples] bool, False where the logits were not finite
    has_choice: (
        torch.Tensor
    )  # [num_samples] bool, False if the parameters left no token; `token_ids` is arbitrary then
    top_logprobs: TopLogprobs | None = None
    """For the samples in `logprob_samples`, in this order."""
    logprob_samples: tuple[int, ...] = ()
    best: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None
    """(sample, scores, token ids) of samples that asked for candidates."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that `fill` reads, in its order."""
        tensors = [torch.stack([self.token_ids, self.is_valid.long(), self.has_choice.long()])]
        if self.top_logprobs is not None:
            tensors += self.top_logprobs.tensors()
        for _, scores, ids in self.best or ():
            tensors += [scores, ids]
        return tensors

    def fill(self, result: StepResult, copies: Iterator[torch.Tensor]) -> None:
        """Write all values into the step's result.

        Args:
            copies: the host's copies of `tensors`, in the same order.
        """
        token_ids, valid, has_choice = next(copies).tolist()
        result.token_ids = [[token] for token in token_ids]
        if self.top_logprobs is not None:
            entries = self.top_logprobs.entries(copies)
            result.logprobs = {
                number: [entry] for number, entry in zip(self.logprob_samples, entries, strict=True)
            }
        result.candidates = {number: _ranked(next(copies), next(copies)) for number, _, _ in self.best or ()}
        result.invalid = frozenset(number for number, is_valid in enumerate(valid) if not is_valid)
        result.without_choice = frozenset(number for number, has_any in enumerate(has_choice) if not has_any)


@dataclass(frozen=True, slots=True)
class StagedSamples:
    """A step's sampling inputs in addition to logits, on the device once the transfer has been sent."""

    changes: StagedChanges | None
    draws: StagedDraws | None
    """None: every sample is greedy, or drawn on the host."""
    asking: torch.Tensor | None
    """[num_asking] int64, the samples that asked for log probabilities; None: there are none."""


class Sampler:
    def __init__(self, eos_token_ids: tuple[int, ...], *, draws_on_device: bool = False) -> None:
        """`draws_on_device`: draw with `pagemill.kernels.dispatch.sample_tokens`, without sorting or waiting."""
        self._processors = LogitsProcessors(eos_token_ids)
        self._draws_on_device = draws_on_device

    def stage(self, work: list[SampleWork], vocab_size: int, transfer: Transfer) -> StagedSamples:
        """Add the inputs of `sample`, except the logits, to the transfer."""
        asking = _asking(work)
        return StagedSamples(
            self._processors.stage(work, vocab_size, transfer),
            stage_draws(work, transfer) if self._draws_on_device else None,
            transfer.put(np.array(asking, dtype=np.int64)) if asking else None,
        )

    def sample(
        self,
        logits: torch.Tensor,
        work: list[SampleWork],
        token_table: torch.Tensor,
        staged: StagedSamples | None = None,
    ) -> SamplerOutput:
        """Choose one token per sample.

        Args:
            logits: [num_samples, vocab_size]; may be overwritten.
            token_table: [num_rows, max_model_len + 1], the tokens so far, for penalties and bad words.
            staged: the result of `stage` for this work; None: it is staged here.
        """
        logits = logits.float()
        staged = staged or self.stage(work, logits.shape[1], DirectTransfer(logits.device))
        peaks, chosen = largest(logits)
        is_valid = torch.isfinite(peaks)  # max propagates NaN
        output = SamplerOutput(chosen, is_valid, torch.ones_like(is_valid))
        raw = logits[staged.asking].log_softmax(dim=-1) if staged.asking is not None else None
        searching = [number for number, item in enumerate(work) if item.sample.num_candidates]
        for number in searching:
            logits[number] = logits[number].log_softmax(dim=-1)
        if (changes := staged.changes) is not None:
            changes.apply(logits, token_table)
            peaks[changes.samples], chosen[changes.samples] = largest(logits[changes.samples])
            output.has_choice[changes.samples] = torch.isfinite(peaks[changes.samples])
        if staged.draws is not None:
            chosen[staged.draws.index] = draw(logits, peaks, staged.draws)
        elif random := [number for number, item in enumerate(work) if not item.params.is_greedy]:
            index = torch.tensor(random, device=logits.device)
            chosen[index] = self._draw(logits[index], [work[number] for number in random])
        if raw is not None and staged.asking is not None:
            output.logprob_samples = asking = tuple(_asking(work))
            counts = [work[number].params.logprobs or 0 for number in asking]
            output.top_logprobs = TopLogprobs.from_logprobs(raw, chosen[staged.asking], counts)
        output.best = [(number, *_best(logits[number], work[number])) for number in searching]
        return output

    @staticmethod
    def sample_narrow(
        logits: torch.Tensor, work: list[SampleWork], vocabulary: NarrowVocabulary
    ) -> SamplerOutput:
        """Sample like `sample`, from logits [num_samples, num_tokens] of a narrow vocabulary; overwrites them."""
        logits = logits.float()
        is_valid = torch.isfinite(logits.amax(dim=-1))
        if vocabulary.barred is not None:
            logits.masked_fill_(vocabulary.barred, -torch.inf)
        peaks, columns = logits.max(dim=-1)
        token_ids = torch.tensor(vocabulary.token_ids)
        random = [number for number, item in enumerate(work) if not item.params.is_greedy]
        if random:
            index, drawn = torch.tensor(random), [work[number] for number in random]
            columns[index] = argmax_of_sums(_cooled(logits[index], drawn), _keys(drawn), token_ids)
        return SamplerOutput(token_ids[columns], is_valid, torch.isfinite(peaks))

    @staticmethod
    def _draw(logits: torch.Tensor, work: list[SampleWork]) -> torch.Tensor:
        """Draw the tokens; overwrites the logits."""
        logits = _cooled(logits, work)
        filter_logits(logits, [item.params for item in work])
        return argmax_with_noise(logits, _keys(work, logits.device))


def _asking(work: list[SampleWork]) -> list[int]:
    return [number for number, item in enumerate(work) if item.params.logprobs is not None]


def _cooled(logits: torch.Tensor, work: list[SampleWork]) -> torch.Tensor:
    """Divide logits by the temperature in place, with each row's maximum shifted to 0."""
    temperatures = torch.tensor([item.params.temperature for item in work], device=logits.device)
    # A tiny temperature must not overflow: only the difference from the best logit matters.
    return logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])


def _keys(work: list[SampleWork], device: torch.device | None = None) -> torch.Tensor:
    return noise_keys(
        torch.tensor([item.row.seed for item in work], dtype=torch.int64, device=device),
        torch.tensor([item.row.sample_index for item in work], device=device),
        torch.tensor([item.output_position for item in work], device=device),
    )


def _ranked(scores: torch.Tensor, ids: torch.Tensor) -> list[tuple[int, float]]:
    """Return (token id, score) of possible tokens, best first, ties by ascending id."""
    pairs = zip(ids.tolist(), scores.tolist(), strict=True)
    possible = [(token, score) for token, score in pairs if score > float("-inf")]
    return sorted(possible, key=lambda candidate: (-candidate[1], candidate[0]))


def _best(row: torch.Tensor, work: SampleWork) -> tuple[torch.Tensor, torch.Tensor]:
    scores, ids = row.topk(min(work.sample.num_candidates, row.shape[0]))
    return scores, ids

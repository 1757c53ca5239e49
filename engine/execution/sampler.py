"""Logits to tokens. Each filter touches only the rows that ask for it; greedy rows cost one argmax.

Order: logprobs from raw logits; then allowed tokens, bias, stop tokens before min_tokens, penalties; then
temperature, top-k, top-p, min-p; then argmax of logits + Gumbel noise, which draws from their softmax. The noise
is a function of (seed, sample, position, token), so a row's draw does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.plan import NewRow, Sample, TokenLogprobs
from engine.sampling_params import SamplingParams
from kernels.noise import gumbel_noise, noise_keys


@dataclass(frozen=True, slots=True)
class SampleWork:
    """One sample: where it goes, and the row it belongs to."""

    sample: Sample
    row: NewRow

    @property
    def params(self) -> SamplingParams:
        return self.row.params

    @property
    def output_position(self) -> int:
        """Tokens generated before this one, resumed ones included."""
        return self.sample.position - self.row.num_prompt_tokens


@dataclass(slots=True)
class SamplerOutput:
    token_ids: torch.Tensor  # [num_samples] int64
    is_valid: torch.Tensor  # [num_samples] bool, False where the logits were not finite
    logprobs: dict[int, list[TokenLogprobs]]


class Sampler:
    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(
        self, logits: torch.Tensor, work: list[SampleWork], token_table: torch.Tensor
    ) -> SamplerOutput:
        """Choose one token per sample.

        Args:
            logits: [num_samples, vocab_size]; may be overwritten.
            token_table: [num_rows, max_model_len + 1], the tokens so far, for penalties.
        """
        logits = logits.float()
        peaks, greedy = logits.max(dim=-1)
        is_valid = torch.isfinite(peaks)  # max propagates NaN
        raw = {
            number: torch.log_softmax(logits[number], dim=-1)
            for number, item in enumerate(work)
            if item.params.logprobs is not None
        }
        changed = self._constrain(logits, work, token_table)
        random = [number for number, item in enumerate(work) if not item.params.is_greedy]
        if changed:
            index = torch.tensor(changed, device=logits.device)
            greedy[index] = logits[index].argmax(dim=-1)
        if random:
            index = torch.tensor(random, device=logits.device)
            greedy[index] = self._draw(logits[index], [work[number] for number in random])
        logprobs = {
            number: [self._logprobs(row, int(greedy[number]), work[number])] for number, row in raw.items()
        }
        return SamplerOutput(greedy, is_valid, logprobs)

    def _constrain(self, logits: torch.Tensor, work: list[SampleWork], tokens: torch.Tensor) -> list[int]:
        """Apply what changes single rows before temperature; returns the rows changed."""
        changed: list[int] = []
        for number, item in enumerate(work):
            params, row = item.params, logits[number]
            before = len(changed)
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=row.device)
                row[ids] += torch.tensor(list(params.logit_bias.values()), device=row.device)
                changed.append(number)
            if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
                _penalise(row, item, tokens)
                changed.append(number)
            if item.output_position < params.min_tokens:
                barred = [*self._eos_token_ids, *params.stop_token_ids]
                row[torch.tensor(barred, dtype=torch.int64, device=row.device)] = -torch.inf
                changed.append(number)
            allowed = _intersect(item.sample.allowed_token_ids, params.allowed_token_ids)
            if allowed is not None:
                ids = torch.tensor(allowed, dtype=torch.int64, device=row.device)
                kept = row[ids]
                row.fill_(-torch.inf)
                row[ids] = kept
                changed.append(number)
            del changed[before + 1 :]
        return changed

    def _draw(self, logits: torch.Tensor, work: list[SampleWork]) -> torch.Tensor:
        device = logits.device
        temperatures = torch.tensor([item.params.temperature for item in work], device=device)
        # A tiny temperature must not overflow: what matters is the distance to the best logit.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
        for number, item in enumerate(work):
            _filter(logits[number], item.params)
        keys = noise_keys(
            torch.tensor([item.row.seed for item in work], dtype=torch.int64, device=device),
            torch.tensor([item.row.sample_index for item in work], device=device),
            torch.tensor([item.output_position for item in work], device=device),
        )
        token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=device)
        return (logits + gumbel_noise(keys, token_ids)).argmax(dim=-1)

    @staticmethod
    def _logprobs(row: torch.Tensor, token_id: int, item: SampleWork) -> TokenLogprobs:
        count = item.params.logprobs or 0
        values, ids = row.topk(count) if count else (row[:0], row[:0])
        top = list(zip((int(i) for i in ids.tolist()), values.tolist(), strict=True))
        return TokenLogprobs(token_id, float(row[token_id]), top)


def _filter(row: torch.Tensor, params: SamplingParams) -> None:
    """Top-k, then top-p of what is left, then min-p, in place. Ties with the last one kept are kept."""
    size = row.shape[-1]
    if 0 < params.top_k < size:
        row[row < row.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1.0:
        ordered = row.sort(descending=True).values
        # Mass before each token: the first whose predecessors reach top_p is out.
        before = ordered.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        kept = int((before < params.top_p).sum()) + 1
        if kept < size:
            row[row < ordered[kept - 1]] = -torch.inf
    if params.min_p > 0.0:
        row[row < row.max() + torch.log(torch.tensor(params.min_p, device=row.device))] = -torch.inf


def _penalise(row: torch.Tensor, item: SampleWork, tokens: torch.Tensor) -> None:
    """Repetition penalty over prompt and output, presence and frequency over output, in place."""
    params, sample = item.params, item.sample
    seen = tokens[sample.row, : sample.position]
    if params.repetition_penalty != 1.0:
        ids = torch.unique(seen)
        scores = row[ids]
        row[ids] = torch.where(
            scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = torch.unique(seen[item.row.num_prompt_tokens :], return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _intersect(first: list[int] | None, second: tuple[int, ...] | None) -> list[int] | None:
    if first is None or second is None:
        return first if second is None else list(second)
    both = set(second).intersection(first)
    # A grammar outranks the caller's list: with nothing in common it still has to be satisfied.
    return [token for token in first if token in both] or first

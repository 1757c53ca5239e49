"""Compares a model's logits with those of transformers at startup.

Used for families that are known only by their code in transformers. Three sequences of random tokens pass through
transformers' eager attention, each alone and in one piece, while the modules are still unmodified. Afterwards the
serving model computes them together: in chunks, packed, and token by token from the paged cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.execution.forward_pass import transformers_logits
from pagemill.engine.execution.input_batch import InputBatch, StepInputs
from pagemill.engine.execution.kv_cache import KVCache
from pagemill.engine.execution.prompt_scorer import PromptScorer
from pagemill.engine.execution.sampling.narrow_head import NarrowHead
from pagemill.engine.execution.staging import DirectTransfer
from pagemill.engine.execution.state_pool import StatePool
from pagemill.engine.layers.attention import AttentionContext, attention_context
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.observation import attending_by
from pagemill.engine.models.families.generic import refusal
from pagemill.engine.models.loader import LoadedModel
from pagemill.engine.models.verified import is_verified, remember_verified
from pagemill.engine.plan import NewRow, RowWork, StepPlan
from pagemill.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# The end of each sequence's part in each step. In a step, rows with one token come first.
_ENDS = ((7, 8, 9, 10, 11), (5, 5, 9, 9, 9), (0, 16, 16, 17, 18))
_ALL_TOKENS_WITHIN = {torch.float32: 1e-3}
"""Largest relative difference of a token's logits: paged and eager attention sum in different orders."""
_MOST_TOKENS_WITHIN = {torch.float16: 0.05, torch.bfloat16: 0.15}
"""The same for three tokens of four: in half precision, a near tie may change the expert of a token."""
_QUANTISED_WITHIN = 0.5
"""For int8 weights or a quantized cache: enough to distinguish a different function from rounding."""
_SHARE = 0.75
_NARROW = (1, 3)
"""Tokens for which the narrow head is called separately."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The outputs of the model in one step."""

    rows: list[tuple[int, int, int]]
    """(sequence, first position, end) of the tokens, in their order."""
    logits: torch.Tensor
    """Logits of all these tokens, possibly followed by padding."""
    token_ids: tuple[int, ...] | None = None
    """The tokens that the logits represent; None: the whole vocabulary."""


class ModelProbe:
    """A model's reference logits. Create it before the model's modules are rewritten, `check` afterwards."""

    def __init__(self, model: LoadedModel, config: EngineConfig, max_model_len: int) -> None:
        """Raises `ModelLoadError` if transformers cannot compute them."""
        self._model, self._config = model, config
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(0)
        self._tokens = [
            torch.randint(model.vocab_size, (min(ends[-1], max_model_len),), generator=generator).tolist()
            for ends in _ENDS
        ]
        try:
            self._logits = [self._reference(tokens) for tokens in self._tokens]
        except Exception as error:  # transformers' code may raise anything
            raise self._refusal(f"the model's own forward pass fails ({error!r})") from error
        self._seconds = time.perf_counter() - started

    @classmethod
    def from_model(cls, model: LoadedModel, config: EngineConfig, max_model_len: int) -> ModelProbe | None:
        """Return None for a model that does not need a comparison, or has already passed one."""
        if not model.family.is_generic or not config.verify or is_verified(model.fingerprint):
            return None
        return cls(model, config, max_model_len)

    @torch.inference_mode()
    def check(self, shape: KVCacheShape) -> None:
        """Compare the model's present logits with the reference.

        Raises:
            ModelLoadError: they differ.
        """
        started = time.perf_counter()
        try:
            worst, limit = self._difference(shape), self._limit(shape.dtype)
        except Exception as error:  # transformers' code may raise anything
            raise self._refusal(f"the forward pass fails in a packed batch ({error!r})") from error
        if not worst <= limit:  # also for NaN
            raise self._refusal(f"the logits differ from transformers' by {worst:.2g}, more than {limit:g}")
        seconds = self._seconds + time.perf_counter() - started
        logger.info("%s: equals transformers' own forward pass (%.1f s)", self._model.served_name, seconds)
        remember_verified(self._model.fingerprint)

    def _refusal(self, reason: str) -> ModelLoadError:
        return refusal(self._model.family.model_types[0], f"{reason}; --no-verify skips the comparison")

    @torch.inference_mode()
    def _reference(self, tokens: list[int]) -> torch.Tensor:
        """Return transformers' logits of a sequence, [num_tokens, vocab_size] fp32."""
        module: Any = self._model.module
        ids = torch.tensor([tokens], device=self._model.device.device)
        with attending_by(module, "eager"):
            logits: torch.Tensor = module(input_ids=ids, use_cache=False).logits
        return logits[0].float()

    def _limit(self, cache_dtype: torch.dtype) -> float:
        if self._config.quantization is not None or cache_dtype is not self._model.dtype:
            return _QUANTISED_WITHIN
        return (_ALL_TOKENS_WITHIN | _MOST_TOKENS_WITHIN)[self._model.dtype]

    def _difference(self, shape: KVCacheShape) -> float:
        """Return the relative difference between the model's logits and the reference."""
        differences = []
        for step in self._steps(shape):
            expected = torch.cat([self._logits[row][start:end] for row, start, end in step.rows])
            if step.token_ids is not None:
                expected = expected[:, list(step.token_ids)]
            error = (step.logits[: len(expected)].float() - expected).norm(dim=-1)
            spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
            differences.append(error / spread.clamp(min=1e-6))
        together = torch.cat(differences)
        is_exact = self._limit(shape.dtype) == _ALL_TOKENS_WITHIN.get(self._model.dtype)
        return float(together.max() if is_exact else together.quantile(_SHARE))

    def _steps(self, shape: KVCacheShape) -> Iterator[_Step]:
        """Run the steps: the first with scored prompts, the last with the narrow head if there is one."""
        module = self._model.module
        batch, caches, new_rows = self._batch(shape)
        head = NarrowHead.from_module(module)
        scorer = PromptScorer(module, caches, batch)
        last = len(_ENDS[0]) - 1
        for number in range(last + 1):
            rows = self._work(number)
            if not rows:
                continue
            work = [RowWork(row, start, end - start) for row, start, end in rows]
            inputs = batch.lay_out(batch.stage(StepPlan(number, new_rows=new_rows, work=work)))
            new_rows = []
            with attention_context(AttentionContext(inputs.metadata, caches)):
                if number == 0:
                    yield _Step(rows, scorer.logits(inputs))
                elif number == last and head is not None:
                    with head.only(_NARROW):
                        yield _Step(rows, self._all_logits(inputs), _NARROW)
                else:
                    yield _Step(rows, self._all_logits(inputs))

    def _all_logits(self, inputs: StepInputs) -> torch.Tensor:
        read = torch.arange(len(inputs.positions), device=inputs.positions.device)
        return transformers_logits(self._model.module, inputs, logits_to_keep=read)

    def _work(self, step: int) -> list[tuple[int, int, int]]:
        """Return a step's rows: (row, first position, end)."""
        work = []
        for row, (ends, tokens) in enumerate(zip(_ENDS, self._tokens, strict=True)):
            bounds = [min(end, len(tokens)) for end in (0, *ends)]
            start, end = list(pairwise(bounds))[step]
            if end > start:
                work.append((row, start, end))
        return sorted(work, key=lambda part: part[2] - part[1] > 1)

    def _batch(self, shape: KVCacheShape) -> tuple[InputBatch, list[Any], list[NewRow]]:
        """Return rows, a cache of a few blocks, and the rows' first entries: their blocks are interleaved."""
        size = shape.block_size
        longest = max(map(len, self._tokens))
        blocks_per_row = -(-longest // size) * len(shape.windows)
        count = len(self._tokens)
        batch = InputBatch(
            max_num_seqs=count,
            max_model_len=longest,
            block_size=size,
            device=self._model.device.device,
            pad_to_bucket=bool(self._config.pad_to_bucket),
            split_decodes=not self._config.batch_invariant,
            transfer=DirectTransfer(self._model.device.device),
            num_groups=len(shape.windows),
            states=StatePool(shape.state, count, self._model.device) if shape.state else None,
        )
        cache = KVCache(shape, 1 + count * blocks_per_row, self._model.device)
        rows = [
            NewRow(row, str(row), 0, tokens, len(tokens),
                   [1 + row + count * block for block in reversed(range(blocks_per_row))],
                   SamplingParams(), seed=0)
            for row, tokens in enumerate(self._tokens)
        ]  # fmt: skip
        return batch, cache.layers, rows

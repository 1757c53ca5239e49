"""Runs plans on the device: anything that happens on a device happens from here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from engine.config import EngineConfig, SchedulerConfig
from engine.execution.attention import AttentionContext, attention_context
from engine.execution.device_tuning import require_batch_invariance, uses_cpu_kernels, warm_up_cpu_kernels
from engine.execution.fusion import fuse
from engine.execution.input_batch import InputBatch, StepInputs
from engine.execution.kv_cache import KVCache, KVCacheShape
from engine.execution.loader import LoadedModel
from engine.execution.logits_processors import SampleWork
from engine.execution.packed_linear import LinearOptions
from engine.execution.parallel.rank_group import RankGroup
from engine.execution.prompt_scorer import PromptLogprobs, PromptScorer
from engine.execution.sampler import Sampler, SamplerOutput
from engine.plan import StepPlan, StepResult


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way: its tokens are on the device, and reach the host in `wait`."""

    plan: StepPlan
    output: SamplerOutput | None
    prepare_s: float
    forward_s: float
    sample_s: float
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def wait(self) -> StepResult:
        result = StepResult(
            self.plan.step_id,
            token_ids=[],
            prepare_s=self.prepare_s,
            forward_s=self.forward_s,
            sample_s=self.sample_s,
        )
        started = time.perf_counter()
        if self.output is not None:
            self.output.fill(result)
        result.prompt_logprobs = {scored.work_index: scored.to_host() for scored in self.prompt_logprobs}
        result.sample_s += time.perf_counter() - started
        return result


class ModelRunner:
    """An `Executor` on a device. One thread owns it."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        limits: SchedulerConfig,
        shape: KVCacheShape,
        group: RankGroup | None = None,
    ) -> None:
        """`group`: the ranks that `model` is a share among; each runs the same plans, and the first one samples."""
        self._group = group
        self._module = model.module
        self._device = model.device
        if uses_cpu_kernels(model.device, model.dtype):
            warm_up_cpu_kernels(model.num_heads, shape)
        if config.batch_invariant:
            require_batch_invariance(model.device, model.dtype)
        linear = LinearOptions(config.quantization, row_invariant=config.batch_invariant)
        fuse(model.module, model.device, model.dtype, linear)
        self.kv_cache = KVCache(shape, limits.num_kv_blocks, model.device, limits.num_host_blocks)
        self._batch = InputBatch(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            device=model.device,
            pad_to_bucket=bool(config.pad_to_bucket),
            split_decodes=not config.batch_invariant,
        )
        self._sampler = Sampler(limits.eos_token_ids)
        self._prompt_scorer = PromptScorer(model.module)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        started = time.perf_counter()
        inputs = self._batch.apply(plan)
        self.kv_cache.move_blocks(plan)
        prepared = time.perf_counter()
        context = AttentionContext(inputs.metadata, self.kv_cache.layers)
        with attention_context(context):
            logits, scored = self._forward(plan, inputs)
        forwarded = time.perf_counter()
        output = self._choose_tokens(plan, logits) if plan.samples else None
        sampled = time.perf_counter()
        return LaunchedStep(
            plan, output, prepared - started, forwarded - prepared, sampled - forwarded, scored
        )

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> tuple[torch.Tensor, list[PromptLogprobs]]:
        """Logits [num_samples, vocab_size], and those of the prompt's tokens where the plan asks for them."""
        if any(work.num_prompt_logprobs is not None for work in plan.work):
            return self._prompt_scorer.forward(
                plan,
                inputs.input_ids,
                inputs.positions,
                inputs.logits_indices,
                self._batch.token_table,
                self._num_prompt_tokens,
            )
        logits = self._module(
            input_ids=inputs.input_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            # An empty index would mean every token to some families; one row is the least to ask for.
            logits_to_keep=inputs.logits_indices if plan.samples else inputs.positions.new_zeros(1),
        ).logits[0]
        return logits, []

    def _num_prompt_tokens(self, row: int) -> int:
        new_row = self._batch.rows[row]
        assert new_row is not None, "work for a row that nothing entered"
        return new_row.num_prompt_tokens

    def _choose_tokens(self, plan: StepPlan, logits: torch.Tensor) -> SamplerOutput | None:
        """Sample, and write the tokens into the token table; ranks that don't sample are told them."""
        output = None
        if self._group is None or self._group.is_first:
            output = self._sample(plan, logits)
            token_ids = output.token_ids
        else:
            token_ids = torch.empty(len(plan.samples), dtype=torch.int64, device=self._device)
        if self._group is not None:
            self._group.broadcast(token_ids)
        rows = torch.tensor([s.row for s in plan.samples], device=self._device)
        positions = torch.tensor([s.position for s in plan.samples], device=self._device)
        self._batch.token_table[rows, positions] = token_ids
        return output

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> SamplerOutput:
        work = []
        for sample in plan.samples:
            row = self._batch.rows[sample.row]
            assert row is not None, "a sample for a row that nothing entered"
            work.append(SampleWork(sample, row))
        return self._sampler.sample(logits, work, self._batch.token_table)

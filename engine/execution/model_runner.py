"""Runs plans on the device: anything that happens on a device happens from here."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.execution.cuda_graphs import DecodeGraphs
from pagemill.engine.execution.device_tuning import (
    require_batch_invariance,
    warm_up_cpu_kernels,
    warm_up_int8_products,
)
from pagemill.engine.execution.input_batch import InputBatch, StepInputs
from pagemill.engine.execution.kv_cache import KVCache
from pagemill.engine.execution.sampling.device_draws import StagedDraws
from pagemill.engine.execution.sampling.narrow_head import NarrowHead, NarrowVocabulary
from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.execution.sampling.prompt_scorer import PromptLogprobs, PromptScorer
from pagemill.engine.execution.sampling.sampler import Sampler, SamplerOutput
from pagemill.engine.execution.staging import DirectTransfer, StagedTransfer
from pagemill.engine.layers.attention import AttentionContext, attention_context
from pagemill.engine.layers.cpu_fusion import CpuFusion
from pagemill.engine.layers.cuda_fusion import CudaFusion
from pagemill.engine.layers.direct_forward import DirectForward
from pagemill.engine.layers.faces import uses_cpu_kernels
from pagemill.engine.layers.fusion import use_fast_linears
from pagemill.engine.layers.linear import LinearOptions
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.models.kv_cache_shape import KVCacheShape
from pagemill.engine.models.loader import LoadedModel
from pagemill.engine.plan import StepPlan, StepResult


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


def captures_graphs(device: torch.device, group: RankGroup | None) -> bool:
    """Whether decode steps can be replayed here. Not with several ranks: what they tell each other is no kernel."""
    return device.type == "cuda" and group is None


def fuse(model: LoadedModel, linear: LinearOptions) -> None:
    """Rewrite what is known of the model's modules, and its linear layers."""
    module: Any = model.module
    if (traits := model.family.decoder) is not None:
        if model.device.type == "cuda":
            CudaFusion(traits, linear).run(module.model)
        elif uses_cpu_kernels(model.device, model.dtype):
            CpuFusion(traits, linear).run(module.model)
    use_fast_linears(module, linear)


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
        if config.batch_invariant:
            require_batch_invariance(model.device, model.dtype)
        linear = LinearOptions(config.quantization, row_invariant=config.batch_invariant)
        is_cuda = model.device.type == "cuda"
        fuse(model, linear)
        if uses_cpu_kernels(model.device, model.dtype):
            warm_up_cpu_kernels(model.module, model.num_heads, shape)
        else:
            warm_up_int8_products(model.module)
        self.kv_cache = KVCache(shape, limits.num_kv_blocks, model.device, limits.num_host_blocks)
        stages = is_cuda if config.stage_inputs is None else config.stage_inputs
        self._transfer = StagedTransfer(model.device) if stages else DirectTransfer(model.device)
        self._batch = InputBatch(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            device=model.device,
            pad_to_bucket=bool(config.pad_to_bucket),
            split_decodes=not config.batch_invariant,
            transfer=self._transfer,
        )
        self._sampler = Sampler(limits.eos_token_ids, draws_on_device=is_cuda)
        self._prompt_scorer = PromptScorer(model.module)
        self._direct = None if is_cuda else DirectForward.of(model.module, model.family.decoder)
        self._narrow_head = None if is_cuda or group is not None else NarrowHead.of(model.module)
        self._graphs: DecodeGraphs | None = None
        if captures_graphs(model.device, group) and not config.enforce_eager:
            self._capture_graphs(limits)

    @torch.inference_mode()
    def _capture_graphs(self, limits: SchedulerConfig) -> None:
        self._graphs = DecodeGraphs(
            self._logits_of_all,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            device=self._device,
        )
        self._graphs.capture()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        started = time.perf_counter()
        graphs = self._graphs if self._graphs is not None and self._graphs.covers(plan) else None
        staged = self._batch.stage(plan, pad=graphs is not None)
        work = self._sample_work(plan)
        draws = self._sampler.stage(work, self._transfer)
        self._transfer.send()
        inputs = self._batch.lay_out(staged)
        self.kv_cache.move_blocks(plan)
        prepared = time.perf_counter()
        scored: list[PromptLogprobs] = []
        vocabulary = None
        if graphs is not None:
            logits = self._pick(graphs.run(inputs), plan, inputs)
        else:
            # Then the head reads more than the samples' hidden states, and all of the vocabulary.
            scores_prompts = any(item.num_prompt_logprobs is not None for item in plan.work)
            read_tokens = None if scores_prompts else self._read_tokens(plan, inputs)
            with attention_context(AttentionContext(inputs.metadata, self.kv_cache.layers, read_tokens)):
                if scores_prompts:
                    logits, scored = self._score_prompts(plan, inputs)
                else:
                    vocabulary = self._narrow_head.vocabulary(work) if self._narrow_head is not None else None
                    logits = self._forward(plan, inputs, vocabulary, read_tokens)
        forwarded = time.perf_counter()
        output = self._choose_tokens(inputs, logits, work, draws, vocabulary) if work else None
        sampled = time.perf_counter()
        return LaunchedStep(
            plan, output, prepared - started, forwarded - prepared, sampled - forwarded, scored
        )

    def is_device_alive(self) -> bool:
        if self._device.type == "cpu":
            return True
        try:
            torch.cuda.synchronize(self._device)
            return torch.ones(1, device=self._device).add(1).item() == 2
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:  # `torch.AcceleratorError`, and what older calls raise
            return False

    def _read_tokens(self, plan: StepPlan, inputs: StepInputs) -> torch.Tensor | None:
        """The tokens whose last hidden states the head reads, once each; None: all of them may be."""
        if self._device.type != "cpu" or len(plan.samples) >= len(inputs.positions):
            return None
        if not plan.samples:
            return inputs.positions.new_zeros(1)  # as `_forward` asks for it
        return torch.tensor(sorted({sample.token_index for sample in plan.samples}))

    def _score_prompts(self, plan: StepPlan, inputs: StepInputs) -> tuple[torch.Tensor, list[PromptLogprobs]]:
        """Logits [num_samples, vocab_size], and the log probabilities of the prompts' tokens that the plan asks for."""
        return self._prompt_scorer.forward(
            plan,
            inputs.input_ids,
            inputs.positions,
            inputs.logits_indices,
            self._batch.token_table,
            self._num_prompt_tokens,
        )

    def _forward(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        vocabulary: NarrowVocabulary | None,
        read_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [num_samples, tokens], of the narrow vocabulary where there is one."""
        head: AbstractContextManager[None] = nullcontext()
        if self._narrow_head is not None and vocabulary is not None:
            head = self._narrow_head.only(vocabulary.token_ids)
        with head:
            if self._direct is not None:
                return self._direct.logits(
                    inputs.input_ids,
                    inputs.positions,
                    self.kv_cache.layers,
                    inputs.metadata,
                    read_tokens,
                    None if _samples_are_tokens(plan, inputs) else inputs.logits_indices,
                )
            logits: torch.Tensor = self._module(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                # An empty index would mean every token to some families; one row is the least to ask for.
                logits_to_keep=inputs.logits_indices if plan.samples else inputs.positions.new_zeros(1),
            ).logits[0]
        return logits

    def _num_prompt_tokens(self, row: int) -> int:
        new_row = self._batch.rows[row]
        assert new_row is not None, "work for a row that nothing entered"
        return new_row.num_prompt_tokens

    def _logits_of_all(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [num_tokens, vocab_size] of every token: what graphs are captured of."""
        with attention_context(AttentionContext(inputs.metadata, self.kv_cache.layers)):
            logits: torch.Tensor = self._module(
                input_ids=inputs.input_ids[None], position_ids=inputs.positions[None], use_cache=False
            ).logits[0]
        return logits

    @staticmethod
    def _pick(logits: torch.Tensor, plan: StepPlan, inputs: StepInputs) -> torch.Tensor:
        """The samples' logits from those of all the step's tokens."""
        if all(sample.token_index == number for number, sample in enumerate(plan.samples)):
            return logits[: len(plan.samples)]
        return logits[inputs.logits_indices]

    def _sample_work(self, plan: StepPlan) -> list[SampleWork]:
        work = []
        for sample in plan.samples:
            row = self._batch.rows[sample.row]
            assert row is not None, "a sample for a row that nothing entered"
            work.append(SampleWork(sample, row))
        return work

    def _choose_tokens(
        self,
        inputs: StepInputs,
        logits: torch.Tensor,
        work: list[SampleWork],
        draws: StagedDraws | None,
        vocabulary: NarrowVocabulary | None,
    ) -> SamplerOutput | None:
        """Sample, and write the tokens into the token table; ranks that don't sample are told them."""
        output = None
        if self._group is None or self._group.is_first:
            if vocabulary is None:
                output = self._sampler.sample(logits, work, self._batch.token_table, draws)
            else:
                output = self._sampler.sample_narrow(logits, work, vocabulary)
            output.start_copy()
            token_ids = output.token_ids
        else:
            token_ids = torch.empty(len(work), dtype=torch.int64, device=self._device)
        if self._group is not None:
            self._group.broadcast(token_ids)
        self._batch.token_table[inputs.sample_rows, inputs.sample_positions] = token_ids
        return output


def _samples_are_tokens(plan: StepPlan, inputs: StepInputs) -> bool:
    """Whether every token of the step is sampled from once, in order."""
    return len(plan.samples) == len(inputs.positions) and all(
        sample.token_index == number for number, sample in enumerate(plan.samples)
    )
